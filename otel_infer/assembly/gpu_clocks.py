"""Returns why and when the clocks of GPUs were throttled while a request was in flight. Pure."""

from __future__ import annotations

from collections import deque

from otel_infer.ringbuffer.events import GpuClocksThrottled

CAPACITY = 120
"""Readings that are kept: ten minutes of a GPU that is throttled all the time."""


class GpuClocks:
    """The latest readings with throttled clocks, of all GPUs of the server."""

    def __init__(self) -> None:
        self._readings: deque[GpuClocksThrottled] = deque(maxlen=CAPACITY)

    def add_reading(self, reading: GpuClocksThrottled) -> None:
        """Adds a reading; they come in order of time."""
        self._readings.append(reading)

    def throttled_between(self, since: int, until: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The reasons in this time (monotonic ns), sorted and joined by commas, and the intervals in which clocks slowed steps.

        Empty where no clock was throttled. An interval reaches from a reading to the next.
        """
        found = [one for one in self._readings if one.until >= since and one.at <= until]
        reasons = {reason for one in found for reason in one.reasons.split(",")}
        return ",".join(sorted(reasons)), tuple((one.at, one.until) for one in found if one.is_slowing)
