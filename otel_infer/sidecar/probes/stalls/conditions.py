"""Determines what is late in a process: its event loop, the steps of an engine, or a request in a thread of its own.

Everything is read from shared memory, a few words each time, by compiled code (`_stall_watch.c`): in Python a look would
cost ten times as much, because nearly every access misses the caches. A step or a request is late beyond four times its
usual time, and 250 ms at least, or 50 ms if that happens again and again. An event loop is late 25 ms after its check was
due. So short blocks are found by chance, if there are many.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings

LOOP_LATE_NS = 25_000_000
MIN_LATE_NS = 250_000_000
USUAL_FACTOR = 4
SHORT_LATE_NS, REPEATED, REPEATED_WITHIN_NS = 50_000_000, 4, 30_000_000_000
"""Four delays within 30 s are repeated: from then on, 50 ms are late."""
_REASONS = events.PAUSE_EVENT_LOOP, events.STALLED_STEP, events.STALLED_REQUEST
_LOOP, _STEP, _REQUEST = range(3)
_FOLLOWED = tuple(
    events.LAYOUT_BY_EVENT[event].code
    for event in (events.RequestSubmitted, events.EngineFinished, events.RequestEnded, events.ExchangeEnded)
)


class Stall(NamedTuple):
    """A delay that lasts since `since` (monotonic ns), and its reason. `thread`: the kernel's id, as its process sees it. `handle`: its request."""

    reason: str
    since: int
    thread: int
    handle: int = 0


class Limit:
    """The time from which something is late. `floor`: nothing shorter needs to be looked at, ns."""

    def __init__(self) -> None:
        self._seen_late: deque[int] = deque(maxlen=REPEATED)
        self._usual_limit = 0
        self.floor = SHORT_LATE_NS

    def set_usual(self, durations: list[int]) -> None:
        """Sets what it usually takes: the shortest tenth of the latest durations, in which nothing was late."""
        usual = sorted(durations)[len(durations) // 10] if durations else 0
        self._usual_limit = USUAL_FACTOR * usual
        self.floor = max(SHORT_LATE_NS, self._usual_limit)

    def is_exceeded(self, duration: int, now: int) -> bool:
        """Returns whether something that takes so long until now is late."""
        if duration < self.floor:
            return False
        self._seen_late.append(now)
        if duration >= max(MIN_LATE_NS, self._usual_limit):
            return True
        return len(self._seen_late) == REPEATED and now - self._seen_late[0] < REPEATED_WITHIN_NS


class ProcessConditions:
    """Conditions of one process. Needs the compiled module."""

    def __init__(self, process: ProcessRings) -> None:
        self.process = process
        header = process.reader.header
        slots = header.words[layout.W_LIVE_SLOTS]
        offsets = layout.request_offsets(header.cells, slots, header.words[layout.W_STRINGS])
        self._watch = native.StallWatch(
            process.reader.memory, header.cells, offsets.live_table, slots, _FOLLOWED, events.SCHEDULED_CODE
        )
        self._engines = 0
        self._steps, self._calls = Limit(), Limit()
        self._set_floors()
        self._watch.loop_floor = LOOP_LATE_NS

    def add_engines(self) -> None:
        """Adds the threads that have begun to run steps."""
        for engine in self.process.engines[self._engines :]:
            self._watch.add_steps(engine.memory, engine.header.cells, engine.position)
        self._engines = len(self.process.engines)

    def find_stalls(self, now: int) -> list[Stall]:
        """Returns what is late."""
        found = self._watch.look(now, self.process.reader.position)
        if not found:
            return []
        self._steps.set_usual(self._watch.list_step_durations())
        # Before an engine, no usual time is long: what a request waits for every time is to be named as well.
        self._calls.set_usual([] if self._engines else self._watch.list_call_durations())
        self._set_floors()
        return [
            Stall(_REASONS[reason], since, thread, handle)
            for reason, since, thread, handle in found
            if self._is_late(reason, now - since, now)
        ]

    def _is_late(self, reason: int, duration: int, now: int) -> bool:
        if reason == _LOOP:
            return True
        return (self._steps if reason == _STEP else self._calls).is_exceeded(duration, now)

    def _set_floors(self) -> None:
        self._watch.step_floor, self._watch.call_floor = self._steps.floor, self._calls.floor

    @property
    def last_step_at(self) -> int:
        """The instant of the last record of a step; 0 = there was none."""
        return int(self._watch.last_step_at)

    @property
    def last_end_at(self) -> int:
        """When the last request ended, by the look that found it; 0 = none did."""
        return int(self._watch.last_end_at)

    def list_waiting_since(self) -> list[int]:
        """Returns when those requests arrived that are in an engine, or that a thread works for."""
        return list(self._watch.list_arrivals())
