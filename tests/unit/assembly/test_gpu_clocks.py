"""The reasons and intervals of throttled GPU clocks while a request was in flight."""

from __future__ import annotations

from otel_infer.assembly.gpu_clocks import CAPACITY, GpuClocks
from otel_infer.ringbuffer.events import GpuClocksThrottled


def clocks(*readings: tuple[int, int, str, bool]) -> GpuClocks:
    known = GpuClocks()
    for reading in readings:
        known.add_reading(GpuClocksThrottled(*reading))
    return known


def test_reasons_are_sorted_and_unique() -> None:
    known = clocks((10, 15, "power_cap", False), (15, 20, "hw_thermal,power_cap", True))
    assert known.throttled_between(12, 30) == ("hw_thermal,power_cap", ((15, 20),))


def test_reading_holds_until_the_next() -> None:
    known = clocks((10, 15, "hw_thermal", True))
    assert known.throttled_between(15, 30) == ("hw_thermal", ((10, 15),))
    assert known.throttled_between(16, 30) == known.throttled_between(0, 9) == ("", ())


def test_old_readings_are_evicted() -> None:
    known = clocks(*((at, at + 1, "hw_thermal", True) for at in range(CAPACITY + 10)))
    assert known.throttled_between(0, 8) == ("", ())
    assert known.throttled_between(0, 11)[0] == "hw_thermal"
