"""Samples the code that late threads are in, within a budget of CPU time.

Between two wake-ups of the sidecar, compiled code looks five to ten times a second whether something is late. Then the stack of that
thread is read, and of others where it waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.sidecar.probes.stalls.blocking_code import find_blocking_code
from otel_infer.sidecar.probes.stalls.conditions import ProcessConditions, Stall, sleep_until_late
from otel_infer.sidecar.probes.stalls.hang import CHECK_INTERVAL_NS, Hang, find_hang
from otel_infer.sidecar.probes.stalls.stack_dump import StackDump
from otel_infer.sidecar.probes.stalls.stack_text import Frame, check_frame, describe_frame, format_stacks

log = logging.getLogger(__name__)

LOOK_INTERVAL_NS, IDLE_INTERVAL_NS = 100_000_000, 200_000_000
"""Interval of looks, and that while nothing was late for `IDLE_AFTER_NS`. A wake-up costs 50 µs on a virtual machine."""
IDLE_AFTER_NS = 10_000_000_000
LIST_INTERVAL_NS = 2_000_000_000
"""Interval at which processes and engine threads that have appeared are added."""
BUDGET_NS_PER_S, MAX_BUDGET_NS = 150_000, 60_000_000
"""CPU time that stacks may take: 0.015 % of a core, and what is saved up while nothing is late."""
HANDLER_NS_PER_BYTE = 150
"""CPU time of the handler in the server, per byte (measured: 1 ms for 6,200 bytes)."""
LOOK_NS = 100_000
"""CPU time of a wake-up that finds something late (measured)."""
HANG_AGAIN_NS = 1_000_000_000
"""Time after which the stacks of a server that hangs are read again; it doubles each time."""
MAX_READ_S = 0.1
"""How long the stacks of other threads are read for one that is late; the sidecar reads nothing else meanwhile."""
MAX_TEXT = 32 << 10
"""Characters of the stacks of a process that hangs."""


class _Watched:
    """One process: what is late in it, and its stacks."""

    def __init__(self, process: ProcessRings) -> None:
        self.conditions, self.dump = ProcessConditions(process), StackDump(process)


class StallSampler:
    """The stalls of all processes of a server.

    `list_processes`: their rings. `add_event`: gets what was found. `on_hang`: called when the server hangs.
    """

    def __init__(
        self,
        list_processes: Callable[[], Iterable[ProcessRings]],
        add_event: Callable[[events.RecordedEvent], None],
        on_hang: Callable[[], None] = lambda: None,
        is_enabled: bool = True,
    ) -> None:
        self._list_processes, self._add_event, self._on_hang = list_processes, add_event, on_hang
        self._is_enabled = is_enabled and native is not None
        self._watched: dict[int, _Watched] = {}
        self._budget_ns, self._refilled_at = MAX_BUDGET_NS, 0
        self._hang: Hang | None = None
        self._hang_due_at = self._hang_wait_ns = 0
        self._listed_at = self._hang_checked_at = self._late_at = 0

    def sleep(self, duration_ns: int) -> None:
        """Sleeps, and looks at the processes meanwhile."""
        until = _clock.now() + duration_ns
        while (now := _clock.now()) < until:
            if not self._is_enabled:
                time.sleep((until - now) / 1e9)
                continue
            try:
                self._sleep_until_late(now, min(until, self._listed_at + LIST_INTERVAL_NS))
            except Exception:
                self._disable()
            else:
                self.look(_clock.now())

    def _sleep_until_late(self, now: int, until: int) -> None:
        reports_from = self._refilled_at + max(-self._budget_ns, 0) * 1_000_000_000 // BUDGET_NS_PER_S
        interval = IDLE_INTERVAL_NS if now - self._late_at > IDLE_AFTER_NS else LOOK_INTERVAL_NS
        processes = [watched.conditions for watched in self._watched.values()]
        sleep_until_late(processes, until, interval, reports_from)

    def look(self, now: int) -> None:
        """Looks at all processes once. An error ends the sampling, not the sidecar."""
        try:
            if now - self._listed_at >= LIST_INTERVAL_NS:
                self._listed_at = now
                self._update_processes(now)
            self._refill_budget(now)
            for ring, watched in self._watched.items():
                stalls = watched.conditions.find_stalls(now)
                if stalls and self._budget_ns > 0:
                    self._late_at = now
                    self._sample(watched, ring, stalls, now)
            if self._hang is not None and now >= self._hang_due_at:
                self._sample_hang(self._hang, now)
        except Exception:
            self._disable()

    def _disable(self) -> None:
        self._is_enabled = False
        log.exception("stacks of late threads are no longer recorded")

    def close(self) -> None:
        """Closes all files."""
        for watched in self._watched.values():
            watched.dump.close()
        self._watched.clear()

    def _update_processes(self, now: int) -> None:
        processes = {process.ring: process for process in self._list_processes() if process.path is not None}
        for ring in [ring for ring in self._watched if ring not in processes]:
            self._watched.pop(ring).dump.close()
        for ring, process in processes.items():
            if ring not in self._watched:
                self._watched[ring] = _Watched(process)
            self._watched[ring].conditions.add_engines()
        if now - self._hang_checked_at >= CHECK_INTERVAL_NS:
            self._hang_checked_at = now
            self._check_hang(now)

    def _sample(self, watched: _Watched, ring: int, stalls: list[Stall], now: int) -> None:
        """Reads the stacks of what is late."""
        began, read = time.thread_time_ns(), watched.dump.bytes_read
        for stall in stalls:
            locate = _locate_hang if stall.reason == events.STALLED_PROCESS else _locate
            located = locate(watched.dump, stall, now)
            if located is not None:
                self._add_event(events.RecordedEvent(ring, stall.handle, located))
        in_server = HANDLER_NS_PER_BYTE * (watched.dump.bytes_read - read)
        self._budget_ns -= time.thread_time_ns() - began + in_server + LOOK_NS

    def _sample_hang(self, hang: Hang, now: int) -> None:
        self._hang_due_at, self._hang_wait_ns = now + self._hang_wait_ns, 2 * self._hang_wait_ns
        for ring, watched in self._watched.items():
            self._sample(watched, ring, [Stall(events.STALLED_PROCESS, hang.since, 0)], now)

    def _check_hang(self, now: int) -> None:
        """Records that the server hangs, or goes on."""
        hang = find_hang([watched.conditions for watched in self._watched.values()], now)
        if (hang is None) != (self._hang is None) and self._watched:
            since, requests = hang or (now, 0)
            ring = next(iter(self._watched))
            self._add_event(events.RecordedEvent(ring, 0, events.HangSeen(now, since, requests)))
            if hang is not None:
                self._hang_due_at, self._hang_wait_ns = now, HANG_AGAIN_NS
                log.warning("the server hangs: %d requests are in flight, and no step ends", requests)
                self._on_hang()
        self._hang = hang

    def _refill_budget(self, now: int) -> None:
        refill = (now - self._refilled_at) * BUDGET_NS_PER_S // 1_000_000_000
        self._budget_ns, self._refilled_at = min(self._budget_ns + refill, MAX_BUDGET_NS), now


class _OtherThreads:
    """The stacks of the threads of a process but one. Each is read when it is asked for."""

    def __init__(self, dump: StackDump, late: int) -> None:
        self._dump, self._late = dump, late

    def read_all(self) -> Iterator[tuple[Frame, ...]]:
        return self._read(sorted(self._dump.list_threads(), key=self._dump.waits_for_futex))

    def read_running(self) -> Iterator[tuple[Frame, ...]]:
        return self._read(self._dump.list_threads(running_only=True))

    def _read(self, threads: Iterable[int]) -> Iterator[tuple[Frame, ...]]:
        until = time.monotonic() + MAX_READ_S
        for thread in threads:
            if thread != self._late and time.monotonic() < until:
                yield self._dump.read_stack(thread)


def _locate(dump: StackDump, stall: Stall, now: int) -> events.CodeLocated | None:
    """Returns the code that a late thread is in; None where it is not known."""
    thread = dump.find_thread(stall.thread)
    waits_for_futex = dump.waits_for_futex(thread)  # before the signal, which ends the wait for a moment
    stack = dump.read_stack(thread) if thread else ()
    if not stack:
        return None
    code = find_blocking_code(stack, _OtherThreads(dump, thread), stall.reason, waits_for_futex)
    if code is None:
        return None
    frame = check_frame(code.place.frame)
    named = describe_frame(code.place.callee), describe_frame(code.waiter)
    return events.CodeLocated(
        now, stall.since, stall.reason, frame.function, frame.file, frame.line, *named, stacks=""
    )


def _locate_hang(dump: StackDump, stall: Stall, now: int) -> events.CodeLocated | None:
    """Returns the stacks of all threads of a process; None where there are none."""
    dump.find_thread(1)  # opens the process
    stacks = [stack for stack in map(dump.read_stack, dump.list_threads()) if stack]
    if not stacks:
        return None
    listed = format_stacks(stacks)[:MAX_TEXT]
    return events.CodeLocated(now, stall.since, stall.reason, "", "", 0, "", "", listed)
