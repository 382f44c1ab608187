"""Merges all rings of one server into one stream of events, in order of time.

A poll returns the events up to the instant of the last `observe` or poll before it, because every process has
committed them by then. A file appears when a process records its first event. It is removed when the process is dead and its
ring is read to the end. A writer's liveness is determined by its file lock, never by its pid: pids differ
between namespaces and are reused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path

from otel_infer import _clock
from otel_infer.config import private_files
from otel_infer.ringbuffer import events, layout, sidecar_claim
from otel_infer.ringbuffer.ledger import RequestLedger
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.reader import InvalidRing, RequestReader, RingNotReady
from otel_infer.ringbuffer.step_reader import StepFile, StepReader

LIVENESS_NS = 250_000_000
SMALL_CELLS = 64
_EVENT_TIME = attrgetter("event.at")
_SUFFIXES = layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS
_READER_EVENTS = (events.EventsLost, events.StepsLost)


class MergedReader:
    """Reader of all rings that were added. `ledger`: gets the requests of rings that are removed."""

    def __init__(self, ledger: RequestLedger | None = None) -> None:
        self.ledger = ledger or RequestLedger()
        self._processes: dict[str, ProcessRings] = {}
        self._ring_numbers = iter(range(1, 1 << 31))
        self._pending: list[events.RecordedEvent] = []
        self._previous = 0
        self._checked_at = 0
        self._known_rings: set[str] = set()
        self.rejected: list[str] = []
        self._counts_before: Counter[str] = Counter(discarded=0)
        self._damaged: list[tuple[int, int]] = []
        self.has_seen_rings = False
        self.horizon = 0
        """Events up to this instant were returned (monotonic ns)."""
        self.fill_ratio = 0.0
        """Share of the fullest ring that was written between the last two polls."""

    # ── finding rings ────────────────────────────────────────────────────────────────────────────────────────────

    def discover_rings(self, folder: Path, now: int, prefix: str = "") -> None:
        """Opens ring files that appeared, of all processes or of those with this prefix.

        Files that are not valid rings are listed in `rejected`.
        """
        try:
            files = private_files.list_names(folder)
        except OSError:
            return
        names = sorted(name for name in files if name.startswith(prefix) and name.endswith(_SUFFIXES))
        for name in sorted(names, key=lambda n: n.endswith(layout.SUFFIX_STEPS)):
            key = os.path.join(folder, name)
            if key not in self._known_rings:
                self._open_ring(folder / name, key, now)
        self.add_rings_of_known_files()

    def add_ring(self, name: str, memory: mmap.mmap, now: int) -> None:
        """Adds a ring in the memory of this process."""
        if name not in self._known_rings:
            self._register_ring(Path(name), name, memory, -1, None, now)
        elif name.endswith(layout.SUFFIX_STEPS):
            self.add_rings_of_known_files()

    def add_rings_of_known_files(self) -> None:
        """Adds step rings that came into use in files that are open."""
        for process in self._processes.values():
            if not all(file.is_complete for file in process.step_files):
                self._add_new_step_rings(process)

    def _open_ring(self, path: Path, key: str, now: int) -> None:
        try:
            descriptor = private_files.open_beside_rings(path, os.O_RDWR)
        except OSError as error:
            if error.errno not in sidecar_claim.RESOURCE_ERRNOS:
                self.rejected.append(f"{path.name}: {error.strerror}")
                self._known_rings.add(key)
            return
        try:
            if not os.fstat(descriptor).st_size:
                raise RingNotReady("empty")
            memory = mmap.mmap(descriptor, 0)
            self._register_ring(path, key, memory, descriptor, path, now)
        except RingNotReady:
            os.close(descriptor)
        except (InvalidRing, ValueError, OSError) as failure:
            os.close(descriptor)
            if not isinstance(failure, OSError) or failure.errno not in sidecar_claim.RESOURCE_ERRNOS:
                self.rejected.append(f"{path.name}: {failure}")
                self._known_rings.add(key)

    def _register_ring(
        self, path: Path, key: str, memory: mmap.mmap, descriptor: int, file: Path | None, now: int
    ) -> None:
        prefix = path.name.removesuffix(layout.SUFFIX_REQUESTS).removesuffix(layout.SUFFIX_STEPS)
        if path.name.endswith(layout.SUFFIX_REQUESTS):
            requests = RequestReader(memory, next(self._ring_numbers))
            if requests.header.text.get("boot_id", "") != layout.read_boot_id():
                raise InvalidRing("written in another boot of this machine")
            process = self._processes[prefix] = ProcessRings(requests.ring, requests, descriptor, file)
            process.is_counted = self.ledger.is_closed(process.started_at)
            self._announce_process(process, now)
        else:
            owner = self._processes.get(prefix.rpartition("-")[0])
            if owner is None:
                raise RingNotReady("the request ring of its process does not exist yet")
            owner.step_files.append(StepFile(memory, descriptor, file))
            self._add_new_step_rings(owner)
        self._known_rings.add(key)
        self.has_seen_rings = True

    def _add_new_step_rings(self, owner: ProcessRings) -> None:
        for memory in (memory for file in owner.step_files for memory in file.take_new_rings()):
            steps = StepReader(memory, next(self._ring_numbers), taken_over=owner.processed_until > 0)
            owner.engines.append(steps)
            if owner.processed_until:
                owner.reported["unrecorded"] += steps.header.words[layout.W_LOST]
            number = steps.header.words[layout.W_NUMBER]
            engine_seen = events.EngineSeen(0, owner.ring, steps.header.pid, steps.engine, number)
            self._pending.append(events.RecordedEvent(steps.ring, 0, engine_seen))

    def _announce_process(self, process: ProcessRings, now: int) -> None:
        header, processed_until = process.reader.header, process.processed_until
        text = header.text
        seen = events.ProcessSeen(
            0, header.pid, str(text.get("role", "")), processed_until, int(text.get("parent", 0))
        )
        self._pending.append(events.RecordedEvent(process.ring, 0, seen))
        if processed_until:  # an earlier reader died: arrivals may have been overwritten since
            self._pending += process.recover_live_requests()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self, now: int, final: bool = False) -> list[events.RecordedEvent]:
        """Returns the events up to the last `observe` or poll, ordered by time; `final`: all events."""
        self.fill_ratio = 0.0
        for prefix, process in list(self._processes.items()):
            try:
                request_events = self._poll_process(process, now, final)
            except Exception as error:  # a damaged ring must not stop the others from being read
                self.rejected.append(f"{prefix}: {type(error).__name__}: {error}")
                self._drop_process(prefix, remove=False)
                continue
            self.fill_ratio = max(
                self.fill_ratio,
                process.reader.fill_ratio,
                *(steps.fill_ratio for steps in process.engines),
            )
            # A loss is always the first event.
            if request_events and isinstance(request_events[0].event, events.EventsLost):
                self._pending += process.recover_live_requests()
                self._pending.append(process.list_live_requests(max(now, _clock.now())))
        self._checked_at = now
        self._remove_dead_processes(now)
        return self._release_until(None if final else self._previous, now)

    def _poll_process(self, process: ProcessRings, now: int, final: bool) -> list[events.RecordedEvent]:
        """Reads the rings of a process; returns the events of its request ring."""
        # Steps first: a step refers only to earlier events, which the request ring, read after, contains.
        step_events = [event for steps in process.engines for event in steps.poll(now, final)]
        request_events = list(process.reader.poll(now, final))
        self._pending += step_events
        self._pending += request_events
        if not process.was_alive:
            instants = [
                recorded.event.at
                for recorded in step_events + request_events
                if not isinstance(recorded.event, _READER_EVENTS)
            ]
            process.latest_event_at = max([process.latest_event_at, *instants])
        return request_events

    def observe(self, now: int) -> None:
        """Lets the next poll return the events up to now; it must follow some ms later."""
        for process in self._processes.values():
            with contextlib.suppress(Exception):  # a damaged ring, which the poll reports
                for steps in process.engines:  # first, as in a poll
                    steps.observe()
                process.reader.observe()
        self._previous = now

    def are_filled_above(self, share: float) -> bool:
        """Returns whether more than this share of any ring was written since the last poll; 0: anything."""
        for process in self._processes.values():  # no generators, whose code is cold at each wake-up
            if process.reader.is_filled_above(share):
                return True
            for steps in process.engines:
                if steps.is_filled_above(share):
                    return True
        return False

    def has_dead_writers(self, now: int) -> bool:
        """Returns whether a process has ended whose rings are open; `poll` removes them. At most every 250 ms."""
        if now - self._checked_at <= LIVENESS_NS:
            return False
        self._checked_at = now
        return any(process.is_dead() for process in self._processes.values())

    @property
    def has_engines(self) -> bool:
        """Returns whether a process has engine threads."""
        return any(process.engines for process in self._processes.values())

    def has_small_rings(self) -> bool:
        """Returns whether there are step rings that soon fill up, because many threads run steps."""
        return any(
            steps.header.cells <= SMALL_CELLS
            for process in self._processes.values()
            for steps in process.engines
        )

    def add_event(self, recorded: events.RecordedEvent) -> None:
        """Adds an event about a process that does not come from its ring; polls return it in order."""
        self._pending.append(recorded)

    def list_writers(self) -> list[tuple[int, int]]:
        """Returns (ring, pid as seen from here) of the living processes that are visible.

        Rings in the memory of this process have none."""
        holders = [(process.ring, process.find_pid()) for process in self._processes.values()]
        return [(ring, pid) for ring, pid in holders if pid]

    def list_engine_threads(self) -> list[tuple[int, int, int, int]]:
        """Returns the threads of the living engines.

        Each is (step ring, pid as seen from here, pid and thread id as their process sees them).
        """
        stepping = [(process, process.find_pid()) for process in self._processes.values() if process.engines]
        return [
            (steps.ring, pid, steps.header.pid, steps.header.words[layout.W_THREAD])
            for process, pid in stepping
            if pid
            for steps in process.engines
        ]

    @property
    def processes(self) -> list[ProcessRings]:
        """The processes whose rings are open."""
        return list(self._processes.values())

    def mark_processed(self, horizon: int) -> None:
        """Records in every ring that requests that ended before `horizon` were exported."""
        for process in self._processes.values():
            words = process.reader.header.words
            words[layout.W_PROCESSED_UNTIL] = max(horizon, words[layout.W_PROCESSED_UNTIL])

    def list_pending_flushes(self) -> list[tuple[int, int]]:
        """Returns (process, request number) of every flush that a writer waits for."""
        return [(p.ring, number) for p in self._processes.values() if (number := p.pending_flush)]

    def complete_flushes(self, flushes: list[tuple[int, int]], refused: Collection[int] = ()) -> None:
        """Marks these flushes as done; `refused`: rings of processes of which a receiver refused something."""
        numbers = dict(flushes)
        for process in self._processes.values():
            if process.ring in numbers:
                process.complete_flush(numbers[process.ring], process.ring in refused)

    def count_discarded(self, requests: int) -> None:
        """Counts requests of dead servers that are not exported; for any thread."""
        self._counts_before["discarded"] += requests

    def read_counts(self) -> Counter[str]:
        """Returns what all processes counted so far: `errors` (probes that raised), `unrecorded` (requests,
        engines and batches that found no room), `values_cut` (events whose values were cut). `discarded`:
        requests of dead servers with another destination.
        """
        counts = Counter(self._counts_before)
        for process in self._processes.values():
            counts.update(process.read_counts())
            counts.subtract(process.reported)
        return counts

    def count_requests(self) -> tuple[int, int]:
        """Returns the requests that were offered to all rings so far, and those of them that were not recorded."""
        counts = [
            self.ledger.closed_counts,
            *self._damaged,
            *(process.read_requests() for process in self._processes.values()),
        ]
        return sum(offered for offered, _ in counts), sum(refused for _, refused in counts)

    def has_holes(self) -> bool:
        """Returns whether a ring is not read further yet, because a cell of it is still being written."""
        return any(process.reader.is_waiting for process in self._processes.values())

    def close(self, remove: bool) -> None:
        """Closes all rings; `remove` deletes the files of living processes too."""
        for prefix in list(self._processes):
            self._drop_process(prefix, remove)

    def _release_until(self, upto: int | None, now: int) -> list[events.RecordedEvent]:
        self._pending.sort(key=_EVENT_TIME)
        cut = len(self._pending) if upto is None else bisect_right(self._pending, upto, key=_EVENT_TIME)
        released, self._pending = self._pending[:cut], self._pending[cut:]
        self.horizon = now if upto is None else upto
        self._previous = now
        return released

    def _remove_dead_processes(self, now: int) -> None:
        for prefix, process in list(self._processes.items()):
            if not process.is_dead():
                process.was_alive = True
                continue
            if process.path is not None:  # its last ring may not be open yet
                self.discover_rings(process.path.parent, now, f"{prefix}-")
            self._poll_process(process, now, final=True)
            rings = {process.ring, *(steps.ring for steps in process.engines)}
            pending = (recorded for recorded in self._pending if recorded.ring in rings)
            instants = [
                recorded.event.at for recorded in pending if not isinstance(recorded.event, _READER_EVENTS)
            ]
            # A process that was dead when it was found may have died hours ago.
            seen_until = (
                now
                if process.was_alive
                else max(process.latest_event_at, process.processed_until) + LIVENESS_NS
            )
            died_at = max([min(now, seen_until), *instants])  # its last event may be younger than `now`
            self._pending += process.recover_live_requests()
            self._pending.append(
                process.list_live_requests(died_at)
            )  # the ends of all other requests were overwritten
            self._pending.append(events.RecordedEvent(process.ring, 0, events.ProcessDied(died_at)))
            self._drop_process(prefix, remove=True)

    def _drop_process(self, prefix: str, remove: bool) -> None:
        process = self._processes.pop(prefix)
        self._counts_before.update(process.read_counts())
        self._counts_before.subtract(process.reported)
        if not remove:
            self._damaged.append(process.read_requests())
        elif not process.is_counted:
            self.ledger.close_ring(process.started_at, *process.read_requests())
        self._known_rings.difference_update(process.close_files(remove))
