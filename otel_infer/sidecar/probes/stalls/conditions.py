"""Determines what is late in a process: its event loop, the steps of an engine, or a request in a thread of its own.

Everything is read from shared memory, a few words each time. A step or a request is late beyond four times its usual
time, and 250 ms at least, or 50 ms if that happens again and again. An event loop is late 25 ms after its check was due.
So short blocks are found by chance, if there are many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.live_view import LiveThread
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.step_reader import StepReader

LOOP_LATE_NS = 25_000_000
MIN_LATE_NS = 250_000_000
USUAL_FACTOR = 4
SHORT_LATE_NS, REPEATED, REPEATED_WITHIN_NS = 50_000_000, 4, 30_000_000_000
"""What was late so often, within so much time, is late from 50 ms on."""
REMEMBERED = 64
"""Durations from which the usual one follows."""


class Stall(NamedTuple):
    """What is late since `since` (monotonic ns). `thread`: as `thread_ids.pack_thread` packs it. `handle`: its request."""

    reason: str
    since: int
    thread: int
    handle: int = 0


class _Limit:
    """The time from which something is late: its usual time, and what was seen late before.

    `has_usual`: whether four times its usual time is never late.
    """

    def __init__(self, has_usual: bool = True) -> None:
        self._durations: deque[int] = deque(maxlen=REMEMBERED)
        self._seen_late: deque[int] = deque(maxlen=REPEATED)
        self.has_usual = has_usual

    def add(self, duration: int, times: int = 1) -> None:
        """Adds durations, of which the shortest tenth is usual: nothing was late in them."""
        self._durations.extend([duration] * min(times, REMEMBERED))

    def is_exceeded(self, duration: int, now: int) -> bool:
        """Returns whether something that takes so long until now is late."""
        durations = sorted(self._durations)
        usual = durations[len(durations) // 10] if durations and self.has_usual else 0
        if duration < max(SHORT_LATE_NS, USUAL_FACTOR * usual):
            return False
        self._seen_late.append(now)
        if duration >= max(MIN_LATE_NS, USUAL_FACTOR * usual):
            return True
        return len(self._seen_late) == REPEATED and now - self._seen_late[0] < REPEATED_WITHIN_NS


class _Steps:
    """The steps of one engine thread, as seen at each look."""

    def __init__(self, reader: StepReader) -> None:
        self._reader, self._limit = reader, _Limit()
        self._last_step = 0
        self.last_at = 0
        """The instant of the last record of a step."""

    def find_stall(self, now: int) -> Stall | None:
        """Returns a step that began and does not end."""
        latest = self._reader.read_latest()
        if latest is None:
            return None
        if latest.step > self._last_step:
            if self._last_step:
                self._limit.add((latest.at - self.last_at) // (latest.step - self._last_step))
            self._last_step = latest.step
        self.last_at = latest.at
        if not latest.is_running or not self._limit.is_exceeded(now - latest.at, now):
            return None
        return Stall(events.STALLED_STEP, latest.at, self._reader.header.words[layout.W_THREAD])


class ProcessConditions:
    """What is late in one process."""

    def __init__(self, process: ProcessRings) -> None:
        self.process = process
        self._view = process.reader.make_live_view()
        self._steps: dict[int, _Steps] = {}
        self._calls: dict[int, LiveThread] = {}
        self._call_limit = _Limit()
        self._offered = self.last_end_at = 0

    def find_stalls(self, now: int) -> list[Stall]:
        """Returns what is late."""
        stalls = list(self._find_late_loops(now))
        for engine in self.process.engines:
            stall = self._steps.setdefault(engine.ring, _Steps(engine)).find_stall(now)
            if stall is not None:
                stalls.append(stall)
        self._view.look_at_cells(self.process.reader.position)
        if self._view.ended or not self.last_end_at:
            self.last_end_at = now
        return stalls + list(self._find_late_requests(now))

    @property
    def last_step_at(self) -> int:
        """The instant of the last step that was seen; 0 = none."""
        return max([steps.last_at for steps in self._steps.values()], default=0)

    def list_waiting_since(self, now: int) -> list[int]:
        """Returns when those requests arrived that are in an engine, or that a thread works for."""
        return self._view.list_arrivals(self._view.read_threads(now).keys())

    def _find_late_loops(self, now: int) -> Iterator[Stall]:
        words = self.process.reader.header.words
        for loop in range(layout.WATCHED_LOOPS):
            due_at = words[layout.W_LOOPS + 2 * loop]
            if due_at and now - due_at > LOOP_LATE_NS:
                yield Stall(events.PAUSE_EVENT_LOOP, due_at, words[layout.W_LOOPS + 2 * loop + 1])

    def _find_late_requests(self, now: int) -> Iterator[Stall]:
        """Yields requests that a thread works for, and that are not in an engine."""
        seen = self._view.read_threads(now)
        # Before an engine, no usual time is long: what a request waits for every time is to be named as well.
        self._call_limit.has_usual = not self.process.engines
        self._add_ended_calls(seen, now)
        for handle, call in seen.items():
            known = self._calls.get(handle)
            if known is None or known.thread != call.thread or handle in self._view.left_engine:
                known = self._calls[handle] = call
            if handle not in self._view.in_engine and self._call_limit.is_exceeded(now - known.seen_at, now):
                yield Stall(events.STALLED_REQUEST, known.seen_at, call.thread, handle)

    def _add_ended_calls(self, seen: dict[int, LiveThread], now: int) -> None:
        """Adds the calls that have ended. Those that began and ended between two looks took less than that."""
        for handle in [handle for handle in self._calls if handle not in seen]:
            self._call_limit.add(now - self._calls.pop(handle).seen_at)
        offered = self.process.reader.header.words[layout.W_OFFERED]
        if self._offered:
            self._call_limit.add(0, max(offered - self._offered - len(seen), 0))
        self._offered = offered
