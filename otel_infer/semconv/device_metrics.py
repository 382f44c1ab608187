"""Metrics of GPUs and of this product itself."""

from __future__ import annotations

from otel_infer.semconv.attributes import (
    CPU_MODE,
    ERROR_TYPE,
    GPU_TASK,
    GPU_UNIT,
    HOOK_STATE,
    HW_DRIVER_VERSION,
    HW_ID,
    HW_MODEL,
    HW_NAME,
    HW_PARENT,
    HW_TYPE,
    HW_VENDOR,
    INTEGRATION,
    KEEP_REASON,
    LOSS_REASON,
    THROTTLE_REASON,
)
from otel_infer.semconv.metrics import COUNTER, GAUGE, UP_DOWN_COUNTER, Metric

_GPU = (HW_ID, HW_NAME, HW_TYPE, HW_MODEL, HW_VENDOR, HW_DRIVER_VERSION, HW_PARENT)
GPU_UTILIZATION = Metric(
    "hw.gpu.utilization",
    GAUGE,
    "1",
    "Share of the time in which any kernel ran, however small: 1 is not full. See infer.gpu.activity.",
    (*_GPU, GPU_TASK),
)
GPU_MEMORY_USAGE = Metric(
    "hw.gpu.memory.usage", UP_DOWN_COUNTER, "By", "Memory of the GPU in use, by whomever.", _GPU
)
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", UP_DOWN_COUNTER, "By", "Memory of the GPU.", _GPU)
GPU_MEMORY_UTILIZATION = Metric(
    "hw.gpu.memory.utilization", GAUGE, "1", "Memory in use / memory there is.", _GPU
)
GPU_POWER = Metric("hw.power", GAUGE, "W", "Power that the GPU draws, over the last second.", _GPU)
GPU_ENERGY = Metric(
    "hw.energy", COUNTER, "J", "Energy that the GPU has used since its driver was loaded.", _GPU
)
GPU_TEMPERATURE = Metric("hw.temperature", GAUGE, "Cel", "Temperature of the GPU.", _GPU)
GPU_ERRORS = Metric(
    "hw.errors",
    COUNTER,
    "{error}",
    "Errors of the GPU: of its memory since its driver was loaded (ECC: corrected, uncorrected); critical ones that the driver "
    "told since the server began (xid_NUMBER).",
    (*_GPU, ERROR_TYPE),
)
ECC_ERRORS = ("corrected", "uncorrected")
"""Of the GPU's memory, as ERROR_TYPE."""
PREEXISTING_COUNTERS: dict[Metric, tuple[str, ...]] = {GPU_ENERGY: (), GPU_ERRORS: ECC_ERRORS}
"""Counters that have counted for longer than we are here; where only some of a counter have, which ones."""
GPU_THROTTLED = Metric(
    "infer.gpu.throttled",
    GAUGE,
    "1",
    "1 while the GPU's clocks are held down for this reason: power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, "
    "power_brake.",
    (*_GPU, THROTTLE_REASON),
)
GPU_ACTIVITY = Metric(
    "infer.gpu.activity",
    GAUGE,
    "1",
    "Share of the cycles in which a unit of the GPU was at work, over 5 s: sm, tensor, dram (GPM, Hopper and later).",
    (*_GPU, GPU_UNIT),
)
SELF_HOOKS = Metric(
    "infer.self.hooks",
    UP_DOWN_COUNTER,
    "{hook}",
    "Hooks of each integration, where its library is in use: bound (active) or not (missing).",
    (INTEGRATION, HOOK_STATE),
)
SELF_LOST = Metric(
    "infer.self.lost",
    COUNTER,
    "{item}",
    "Telemetry that did not arrive, by reason: facts overwritten or torn, requests there was no room for, step spans over budget, spans refused.",
    (LOSS_REASON,),
)
SELF_STEPS_DROPPED = Metric(
    "infer.self.steps.dropped",
    COUNTER,
    "{span}",
    "Step spans that there was no room for, by the reason for which their request was kept.",
    (KEEP_REASON,),
)
SELF_ERRORS = Metric("infer.self.errors", COUNTER, "{error}", "Probes of ours that raised and were disabled.")
SELF_SPANS = Metric("infer.self.spans", COUNTER, "{span}", "Spans that the destination accepted.")
SELF_BYTES = Metric(
    "infer.self.export.size", COUNTER, "By", "Bytes of spans handed to the exporter, uncompressed."
)
SELF_SHARE = Metric(
    "infer.self.steps.share",
    GAUGE,
    "1",
    "Share of the step spans that may be made, so that the sidecar stays inside OTEL_INFER_BUDGET; 1 = all.",
)
SELF_CPU = Metric("infer.self.cpu.time", COUNTER, "s", "CPU time of the sidecar.", (CPU_MODE,))
SELF_MEMORY = Metric("infer.self.memory.usage", UP_DOWN_COUNTER, "By", "Resident memory of the sidecar.")
