"""Returns why and when the clocks of GPUs were throttled while a request was in flight. Pure."""

from __future__ import annotations

from collections import deque

from otel_infer.assembly.engine.workers import WorkerState
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer.events import GpuClocksThrottled

CAPACITY = 120
"""Stored readings: ten minutes of a GPU that is throttled all the time."""


class GpuClocks:
    """The latest readings with throttled clocks, of all GPUs of the server."""

    def __init__(self) -> None:
        self._readings: deque[GpuClocksThrottled] = deque(maxlen=CAPACITY)

    @property
    def has_readings(self) -> bool:
        """Returns whether clocks were throttled at all."""
        return bool(self._readings)

    def add_reading(self, reading: GpuClocksThrottled) -> None:
        """Adds a reading; they come in order of time."""
        self._readings.append(reading)

    def throttled_between(self, since: int, until: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns why and when clocks were throttled in this time (monotonic ns); empty where they were not.

        The reasons are sorted and joined by commas. The intervals are those in which clocks slowed steps;
        each lasts from a reading to the next.
        """
        readings = [reading for reading in self._readings if reading.until >= since and reading.at <= until]
        reasons = {reason for reading in readings for reason in reading.reasons.split(",")}
        return ",".join(sorted(reasons)), tuple(
            (reading.at, reading.until) for reading in readings if reading.is_slowing
        )


def add_device_state(record: RequestRecord, workers: WorkerState, clocks: GpuClocks) -> RequestRecord:
    """Sets the free memory of devices, and throttled clocks, during a request. Returns its record."""
    if workers.has_memory:
        instants = record.arrived_at, record.first_token_at, record.ended_at
        at_arrival, at_first_token, at_end = map(workers.min_free_memory, instants)
        record.memory_free = at_arrival, at_first_token, at_end
    if clocks.has_readings:
        throttled = clocks.throttled_between(record.arrived_at, record.ended_at)
        record.gpu_throttled, record.gpu_throttled_at = throttled
    return record
