"""A fake device: ordered streams, a clock with drift and resolution, float32 milliseconds, captures, failures.

The host's clock is virtual and advances by the cost of each call. `benchmarks/gpu_verify.py` runs the same checks on a real
device; `tests/gpu` compares the fake with recordings of a real one.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from otel_infer import _clock

NEVER = 1 << 62


class FakeEvent:
    """`at`: host instant at which the device reaches it. `device_ns`: the device clock at that instant."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at: int | None = None
        self.device_ns = 0
        self.in_graph = False

    def record(self, stream: FakeStream) -> None:
        device = self._device
        device.count_call("record")
        self.in_graph = device.in_capture
        if not self.in_graph:
            self.at = stream.advance_to(device.now() + device.launch_ns)
            stream.free_at += device.mark_ns
            self.device_ns = device.read_clock(self.at)

    def query(self) -> bool:
        self._device.count_query("query")
        self._check()
        return self.at is None or self.at <= self._device.now()

    def elapsed_time(self, end: FakeEvent) -> float:
        """Returns ms, as float32."""
        device = self._device
        device.count_query("elapsed")
        for event in (self, end):
            event._check()
            if event.at is None or event.at > device.now():
                raise RuntimeError("device not ready")
        milliseconds = (end.device_ns - self.device_ns) / 1e6
        return float(struct.unpack("f", struct.pack("f", milliseconds))[0])

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    def _check(self) -> None:
        if self.in_graph:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


class FakeStream:
    """Work launched on it runs in order. `free_at`: when all of it is done."""

    def __init__(self) -> None:
        self.free_at = 0

    def advance_to(self, earliest: int) -> int:
        self.free_at = max(self.free_at, earliest)
        return self.free_at

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class FakeDevice:
    """`drift_ppm`: how much faster its clock runs than the host's. `call_ns`: host time of a call.

    `launch_ns`: time from a call to the device. `mark_ns`: device time of an event.
    """

    kind, index = "fake", 0

    def __init__(
        self,
        drift_ppm: float = 0.0,
        tick_ns: int = 32,
        call_ns: int = 1000,
        launch_ns: int = 4000,
        offset_ns: int = 10**12,
        mark_ns: int = 0,
    ) -> None:
        self.drift, self.tick_ns, self.call_ns, self.launch_ns = drift_ppm * 1e-6, tick_ns, call_ns, launch_ns
        self.mark_ns = mark_ns
        self._offset, self._time = offset_ns, 10**9
        self.calls: Counter[str] = Counter()
        self.in_capture = self.was_broken = self.is_lost = False
        self.main = FakeStream()

    # ── the host ─────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> int:
        return self._time

    def pass_time(self, ns: int) -> None:
        self._time += ns

    def wait_for(self, stream: FakeStream) -> None:
        """Waits for a stream, as an engine does for its tokens."""
        self._time = max(self._time, stream.free_at) + self.call_ns

    def launch(self, length_ns: int, stream: FakeStream | None = None) -> tuple[int, int]:
        """Launches work of the application; returns its begin and end, host ns."""
        self._time += self.call_ns
        stream = stream or self.main
        begins = stream.advance_to(self._time + self.launch_ns)
        stream.free_at = begins + length_ns
        return begins, stream.free_at

    # ── the device ───────────────────────────────────────────────────────────────────────────────────────────────

    def count_call(self, name: str) -> None:
        self.calls[name] += 1
        self._time += self.call_ns
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def count_query(self, name: str) -> None:
        """Makes a query, which breaks a capture."""
        self.count_call(name)
        if self.in_capture:
            self.was_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def read_clock(self, at: int) -> int:
        """Returns the device clock at this host instant."""
        return int(self._offset + at * (1 + self.drift)) // self.tick_ns * self.tick_ns

    def create_event(self) -> FakeEvent:
        self.calls["event"] += 1
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.main

    def create_idle_stream(self) -> FakeStream:
        return FakeStream()

    def is_capturing(self) -> bool:
        self.calls["capturing"] += 1
        return self.in_capture

    def prepare_thread(self) -> None:
        self.calls["adopt"] += 1

    def occupy_stream(self, stream: FakeStream) -> bool:
        self.launch(1_000_000, stream)
        return True

    def record_and_poll(self, event: Any, stream: FakeStream) -> tuple[int, int] | None:
        before = self.now()
        event.record(stream)
        while not event.query():
            if self.now() - before > 50_000:
                return None
        return before, self.now()


class OnHostClock(FakeDevice):
    """A fake device on the real host clock, which advances by itself."""

    @property
    def _time(self) -> int:
        return _clock.now()

    @_time.setter
    def _time(self, to: int) -> None:
        """Ignores writes: the real clock cannot be set."""
