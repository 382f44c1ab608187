"""The state of GPUs as metrics: `hw.*` where the conventions have a name, ours for what they lack."""

from __future__ import annotations

from collections.abc import Iterable

from otel_infer import semconv
from otel_infer.export.metrics.counters import SetValue
from otel_infer.gpu.nvml_poller import GpuReading
from otel_infer.ringbuffer.events import MemorySeen, Value

_PLAIN_METRICS = {
    ("utilization", "general"): semconv.GPU_UTILIZATION,
    ("memory", "used"): semconv.GPU_MEMORY_USAGE,
    ("memory", "total"): semconv.GPU_MEMORY_LIMIT,
    ("power", ""): semconv.GPU_POWER,
    ("energy", ""): semconv.GPU_ENERGY,
    ("temperature", ""): semconv.GPU_TEMPERATURE,
}
_KEYED_METRICS = {
    "throttled": (semconv.GPU_THROTTLED, semconv.THROTTLE_REASON),
    "errors": (semconv.GPU_ERRORS, semconv.ERROR_TYPE),
    "xids": (semconv.GPU_ERRORS, semconv.ERROR_TYPE),
    "activity": (semconv.GPU_ACTIVITY, semconv.GPU_UNIT),
}
STATE_METRICS = tuple(
    metric
    for metric in (
        *_PLAIN_METRICS.values(),
        *(metric for metric, _ in _KEYED_METRICS.values()),
        semconv.GPU_MEMORY_UTILIZATION,
    )
    if metric.instrument != semconv.COUNTER
)
"""What `say` sets of GPUs that are there now."""
MEMORY_METRICS = semconv.DEVICE_MEMORY, semconv.PINNED_MEMORY
"""What `say_memory` sets of processes that are there now."""


def set_gpu_metrics(readings: Iterable[GpuReading], driver: str, set_value: SetValue) -> None:
    """Sets every value."""
    used: dict[str, dict[str, float]] = {}
    for reading in readings:
        uuid, _, _, _, what, of, value = reading
        who = _attributes_of_device(reading, driver)
        plain = _PLAIN_METRICS.get((what, of))
        if plain is not None:
            task = {semconv.GPU_TASK: of} if plain is semconv.GPU_UTILIZATION else {}
            set_value(plain, {**who, **task}, value)
        else:
            metric, key = _KEYED_METRICS[what]
            set_value(metric, {**who, key: of}, value)
        if what == "memory":
            both = used.setdefault(uuid, {})
            both[of] = value
            if both.get("total") and "used" in both:
                set_value(semconv.GPU_MEMORY_UTILIZATION, who, both["used"] / both["total"])


def _attributes_of_device(device: GpuReading, driver: str) -> dict[str, Value]:
    said: dict[str, Value] = {
        semconv.HW_ID: device.uuid,
        semconv.HW_NAME: f"GPU {device.number}",
        semconv.HW_TYPE: "gpu",
        semconv.HW_MODEL: device.name,
        semconv.HW_VENDOR: "NVIDIA",
        semconv.HW_DRIVER_VERSION: driver,
    }
    return {**said, semconv.HW_PARENT: device.parent} if device.parent else said


def set_memory_metrics(seen: Iterable[tuple[int, MemorySeen]], set_value: SetValue) -> None:
    """Sets what processes (pid) say of their devices."""
    for pid, fact in seen:
        _, uuid, allocated, reserved, active, split, free, total, pools, pinned = fact
        values = {"allocated": allocated, "reserved": reserved, "active": active, "inactive_split": split}
        if total:
            values |= {"free": free, "outside": max(total - free - reserved, 0)}
        if pools >= 0:
            values["private_pools"] = pools
        if pinned >= 0:
            set_value(semconv.PINNED_MEMORY, {semconv.PROCESS_PID: pid}, pinned)
        for kind, value in values.items():
            said: dict[str, Value] = {
                semconv.HW_ID: uuid,
                semconv.PROCESS_PID: pid,
                semconv.MEMORY_KIND: kind,
            }
            set_value(semconv.DEVICE_MEMORY, said, value)
