"""Sets metrics of GPU state: `hw.*` where the conventions have a name, `infer.*` otherwise."""

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
"""Metrics that `set_gpu_metrics` sets for the GPUs present now."""
MEMORY_METRICS = semconv.DEVICE_MEMORY, semconv.PINNED_MEMORY
"""Metrics that `set_memory_metrics` sets for the processes present now."""


def set_gpu_metrics(readings: Iterable[GpuReading], driver: str, set_value: SetValue) -> None:
    """Sets all values of these readings, and the memory utilization."""
    memory_by_device: dict[str, dict[str, float]] = {}
    for reading in readings:
        uuid, _, _, _, quantity, label, value = reading
        device = _attributes_of_device(reading, driver)
        plain = _PLAIN_METRICS.get((quantity, label))
        if plain is not None:
            task = {semconv.GPU_TASK: label} if plain is semconv.GPU_UTILIZATION else {}
            set_value(plain, {**device, **task}, value)
        else:
            metric, key = _KEYED_METRICS[quantity]
            set_value(metric, {**device, key: label}, value)
        if quantity == "memory":
            memory = memory_by_device.setdefault(uuid, {})
            memory[label] = value
            if memory.get("total") and "used" in memory:
                set_value(semconv.GPU_MEMORY_UTILIZATION, device, memory["used"] / memory["total"])


def _attributes_of_device(device: GpuReading, driver: str) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        semconv.HW_ID: device.uuid,
        semconv.HW_NAME: f"GPU {device.number}",
        semconv.HW_TYPE: "gpu",
        semconv.HW_MODEL: device.name,
        semconv.HW_VENDOR: "NVIDIA",
        semconv.HW_DRIVER_VERSION: driver,
    }
    return {**attributes, semconv.HW_PARENT: device.parent} if device.parent else attributes


def set_memory_metrics(reports: Iterable[tuple[int, MemorySeen]], set_value: SetValue) -> None:
    """Sets the memory that processes (by pid) reported for their devices."""
    for pid, report in reports:
        _, uuid, allocated, reserved, active, split, free, total, pools, pinned = report
        values = {
            semconv.MEMORY_KIND_ALLOCATED: allocated,
            semconv.MEMORY_KIND_RESERVED: reserved,
            semconv.MEMORY_KIND_ACTIVE: active,
            semconv.MEMORY_KIND_INACTIVE_SPLIT: split,
        }
        if total:
            values[semconv.MEMORY_KIND_FREE] = free
            values[semconv.MEMORY_KIND_OUTSIDE] = max(total - free - reserved, 0)
        if pools >= 0:
            values[semconv.MEMORY_KIND_PRIVATE_POOLS] = pools
        if pinned >= 0:
            set_value(semconv.PINNED_MEMORY, {semconv.PROCESS_PID: pid}, pinned)
        for kind, value in values.items():
            attributes: dict[str, Value] = {
                semconv.HW_ID: uuid,
                semconv.PROCESS_PID: pid,
                semconv.MEMORY_KIND: kind,
            }
            set_value(semconv.DEVICE_MEMORY, attributes, value)
