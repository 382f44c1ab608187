"""Defines metrics of GPUs and of otel_infer itself."""

from __future__ import annotations

from otel_infer.semconv.attributes import (
    CPU_MODE,
    ERROR_TYPE,
    EXPORT_RESULT,
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
    "Share of the time in which at least one kernel ran, of any size; 1 does not mean full load. See "
    "infer.gpu.activity.",
    (*_GPU, GPU_TASK),
)
GPU_MEMORY_USAGE = Metric(
    "hw.gpu.memory.usage", UP_DOWN_COUNTER, "By", "GPU memory in use by any process.", _GPU
)
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", UP_DOWN_COUNTER, "By", "GPU memory in total.", _GPU)
GPU_MEMORY_UTILIZATION = Metric(
    "hw.gpu.memory.utilization", GAUGE, "1", "GPU memory in use / in total, 0 to 1.", _GPU
)
GPU_POWER = Metric("hw.power", GAUGE, "W", "Power draw of the GPU over the last second.", _GPU)
GPU_ENERGY = Metric(
    "hw.energy", COUNTER, "J", "Energy that the GPU has used since its driver was loaded.", _GPU
)
GPU_TEMPERATURE = Metric("hw.temperature", GAUGE, "Cel", "Temperature of the GPU.", _GPU)
GPU_ERRORS = Metric(
    "hw.errors",
    COUNTER,
    "{error}",
    "Errors of the GPU: of its memory since its driver was loaded (ECC: corrected, uncorrected); critical "
    "errors that the driver reported since the server started (xid_NUMBER).",
    (*_GPU, ERROR_TYPE),
)
ECC_CORRECTED, ECC_UNCORRECTED = ECC_ERRORS = ("corrected", "uncorrected")
"""Values of `error.type` for errors of GPU memory."""
PREEXISTING_COUNTERS: dict[Metric, tuple[str, ...]] = {GPU_ENERGY: (), GPU_ERRORS: ECC_ERRORS}
"""Counters that counted before this process started.

Attribute values limit this to their series; empty = all series.
"""
GPU_THROTTLED = Metric(
    "infer.gpu.throttled",
    GAUGE,
    "1",
    "1 while the GPU's clocks are throttled for this reason: power_cap, hw_slowdown, sync_boost, "
    "sw_thermal, hw_thermal, power_brake.",
    (*_GPU, THROTTLE_REASON),
)
GPU_ACTIVITY = Metric(
    "infer.gpu.activity",
    GAUGE,
    "1",
    "Share of the cycles in which a unit of the GPU was active, over 5 s: sm, tensor, dram (GPM, Hopper and "
    "later).",
    (*_GPU, GPU_UNIT),
)
SELF_PREFIX = "infer.self."
"""Beginning of the names of metrics that describe otel_infer itself."""
SELF_HOOKS = Metric(
    "infer.self.hooks",
    UP_DOWN_COUNTER,
    "{hook}",
    "Hooks of each integration whose library is in use: installed (active) or not (missing).",
    (INTEGRATION, HOOK_STATE),
)
SELF_LOST = Metric(
    "infer.self.lost",
    COUNTER,
    "{item}",
    "Telemetry that was lost, by reason: events overwritten or torn, requests not recorded or not "
    "converted, step spans over the budget, spans not encoded, dropped from a full queue or refused, "
    "metrics refused.",
    (LOSS_REASON,),
)
SELF_REQUESTS_OFFERED = Metric(
    "infer.self.requests.offered",
    COUNTER,
    "{request}",
    "Requests that reached otel_infer, recorded or not. They are the exported, not sampled, redundant, open and "
    "lost ones.",
)
SELF_REQUESTS = Metric(
    "infer.self.requests",
    COUNTER,
    "{request}",
    "Requests that the destination accepted (exported), that are not sampled, or that another library's span "
    "contains (redundant).",
    (EXPORT_RESULT,),
)
SELF_REQUESTS_LOST = Metric(
    "infer.self.requests.lost",
    COUNTER,
    "{request}",
    "Requests of which no span arrived, by reason: not recorded, events overwritten, sidecar ended, not converted, "
    "not encoded, queue full, refused, unconfirmed.",
    (LOSS_REASON,),
)
SELF_REQUESTS_OPEN = Metric(
    "infer.self.requests.open",
    UP_DOWN_COUNTER,
    "{request}",
    "Requests that are recorded and not settled: in flight, held for a decision, or waiting to be sent.",
)
SELF_STEPS_DROPPED = Metric(
    "infer.self.steps.dropped",
    COUNTER,
    "{span}",
    "Step spans that were dropped because of the budget, by the keep reason of their request.",
    (KEEP_REASON,),
)
SELF_ERRORS = Metric(
    "infer.self.errors",
    COUNTER,
    "{error}",
    "Exceptions in probes, and calls by hand that were not recorded because of their arguments.",
)
SELF_RESTARTS = Metric(
    "infer.self.restarts",
    COUNTER,
    "{restart}",
    "Sidecars of this server that followed another one, because that one was killed or crashed.",
)
SERVER_STOPPED = Metric(
    "infer.server.stopped",
    GAUGE,
    "{server}",
    "0 while the server runs, and after its death; 1 after its orderly end or a signal to stop.",
)
SELF_SPANS = Metric("infer.self.spans", COUNTER, "{span}", "Spans that the destination accepted.")
SELF_BYTES = Metric(
    "infer.self.export.size", COUNTER, "By", "Size of the spans passed to the exporter, uncompressed."
)
SELF_SHARE = Metric(
    "infer.self.steps.share",
    GAUGE,
    "1",
    "Share of the step spans that may be exported, which keeps the sidecar within OTEL_INFER_BUDGET; 1 = "
    "all.",
)
SELF_CPU = Metric("infer.self.cpu.time", COUNTER, "s", "CPU time of the sidecar.", (CPU_MODE,))
SELF_MEMORY = Metric("infer.self.memory.usage", UP_DOWN_COUNTER, "By", "Resident memory of the sidecar.")
