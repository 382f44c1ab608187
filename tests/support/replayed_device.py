"""Replays a recording of `benchmarks.gpu_verify` from a real device, for tests without one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORDINGS = sorted(RESULTS.glob("recording-*.json"))


class ReplayedEvent:
    """`ms`: when the device reached it, since the first event of the recording."""

    def __init__(self, device: ReplayedDevice) -> None:
        self._device = device
        self.ms = 0.0

    def record(self, stream: Any) -> None:
        self.ms = self._device.next_mark()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: ReplayedEvent) -> float:
        return float(struct.unpack("f", struct.pack("f", end.ms - self.ms))[0])


class ReplayedDevice:
    """`now`: the recording's host clock. `row`: the stage being replayed."""

    kind, index = "fake", 0
    tick_ns = 1000

    def __init__(self, path: Path) -> None:
        self.recording = json.loads(path.read_text())
        self.time = 0
        self._marks: list[float] = []
        self._warm = 0.0
        self._anchors = list(self.recording["anchors"])
        self._stamp: tuple[int, int, float] | None = None

    def now(self) -> int:
        return int(self.time)

    def next_mark(self) -> float:
        """Returns the next mark of the row; without a row, marks follow at the smallest distance."""
        if self._marks:
            return self._marks.pop(0)
        self._warm += self.recording["own_ms"]
        return self._warm

    def begin(self, row: dict[str, Any]) -> None:
        self._marks = [row["start_ms"], row["end_ms"]]
        self.time = row["begun_at"]

    def anchors_until(self, at: int) -> list[tuple[int, int, float]]:
        """Returns the anchors made before this instant and not yet taken."""
        due = [anchor for anchor in self._anchors if anchor[1] <= at]
        self._anchors = self._anchors[len(due) :]
        return due

    def stamps(self, anchor: tuple[int, int, float]) -> None:
        """Sets what the next stamp returns."""
        self._stamp = anchor

    def create_event(self) -> ReplayedEvent:
        return ReplayedEvent(self)

    def current_stream(self) -> str:
        return "main"

    def create_idle_stream(self) -> str:
        return "idle"

    def is_capturing(self) -> bool:
        return False

    def prepare_thread(self) -> None:
        pass

    def occupy_stream(self, stream: Any) -> bool:
        return True

    def record_and_poll(self, event: ReplayedEvent, stream: Any) -> tuple[int, int] | None:
        if self._stamp is None:
            return None
        low, high, event.ms = self._stamp
        self._stamp = None
        return low, high
