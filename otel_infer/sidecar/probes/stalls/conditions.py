"""Determines what is late in a process: its event loop, the steps of an engine, or a request in a thread of its own.

Everything is read from shared memory, a few words each time, by compiled code (`_stall_watch.c`), which has the limits: in
Python a look would cost ten times as much, because nearly every access misses the caches.

- An event loop is late 25 ms after its check was due. So short blocks are found by chance, if there are many.
- A step or a request is late beyond four times its usual time, and 250 ms at least; or 50 ms, from the fourth time within
  30 s. What is usual is the shortest tenth of the latest 64. Before an engine, no usual time is long: what a request
  waits for every time is to be named as well.
- A delay that lasts is reported again after 1, 2, 4, … s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings

_REASONS = events.PAUSE_EVENT_LOOP, events.STALLED_STEP, events.STALLED_REQUEST
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


class ProcessConditions:
    """Conditions of one process. Needs the compiled module."""

    def __init__(self, process: ProcessRings) -> None:
        self.process = process
        header = process.reader.header
        slots = header.words[layout.W_LIVE_SLOTS]
        offsets = layout.request_offsets(header.cells, slots, header.words[layout.W_STRINGS])
        self.watch = native.StallWatch(
            process.reader.memory, header.cells, offsets.live_table, slots, _FOLLOWED, events.SCHEDULED_CODE
        )
        self._engines = 0

    def add_engines(self) -> None:
        """Adds the threads that have begun to run steps."""
        for engine in self.process.engines[self._engines :]:
            self.watch.add_steps(engine.memory, engine.header.cells, engine.position)
        self._engines = len(self.process.engines)

    def find_stalls(self, now: int) -> list[Stall]:
        """Returns what is late: what was found since the last call, and what is found now."""
        self.watch.read = self.process.reader.position
        self.watch.look(now)
        return [
            Stall(_REASONS[reason], since, thread, handle)
            for reason, since, thread, handle in self.watch.take_rows()
        ]

    @property
    def last_step_at(self) -> int:
        """The instant of the last record of a step; 0 = there was none."""
        return int(self.watch.last_step_at)

    @property
    def last_end_at(self) -> int:
        """When the last request ended, by the look that found it; 0 = none did."""
        return int(self.watch.last_end_at)

    def list_waiting_since(self) -> list[int]:
        """Returns when those requests arrived that are in an engine, or that a thread works for."""
        return list(self.watch.list_arrivals())


def sleep_until_late(
    processes: Sequence[ProcessConditions], until: int, interval: int, reports_from: int = 0
) -> None:
    """Sleeps until an instant (monotonic ns), or until something is late. Looks once an interval (ns).

    What is late before `reports_from` is not reported, and looks are half as frequent then.
    """
    for conditions in processes:
        conditions.watch.read = conditions.process.reader.position
    watches = tuple(conditions.watch for conditions in processes)
    native.sleep_until_late(watches, until, interval, reports_from)
