"""All rings of one server as one stream of facts, in order of time.

A poll hands out what happened before the previous poll: by then every process has committed it. Files appear when a
process states its first fact and are removed when it is dead and read to the end. Whether a writer lives is asked of
its file lock, never of a pid: pids lie across namespaces and are reused.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import numpy as np

from otel_infer import _clock
from otel_infer.ringbuffer import directory, events, layout
from otel_infer.ringbuffer.reader import InvalidRing, RequestReader, RingNotReady
from otel_infer.ringbuffer.step_reader import StepReader

LIVENESS_NS = 250_000_000
_EVENT_TIME = attrgetter("event.at")
_SUFFIXES = layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS
_READER_EVENTS = (events.EventsLost, events.StepsLost)


class _ProcessRings:
    """The rings of one writing process. `descriptor` is −1 for rings in our own memory."""

    def __init__(self, ring: int, reader: RequestReader, descriptor: int, path: Path | None) -> None:
        self.ring, self.reader, self.descriptor, self.path = ring, reader, descriptor, path
        self.engines: list[tuple[StepReader, int, Path | None]] = []
        self.processed_until = int(reader.header.words[layout.W_PROCESSED_UNTIL])
        """By a reader before us; 0 = there was none."""
        self.latest_event_at = 0
        self.was_alive = False
        self.reported_unrecorded = self.count_unrecorded() if self.processed_until else 0
        self.reported_errors = self.count_errors() if self.processed_until else 0

    def count_errors(self) -> int:
        """Probes that raised, so far."""
        return int(self.reader.header.words[layout.W_ERRORS])

    def count_unrecorded(self) -> int:
        """What there was no room for, so far."""
        lost = [int(steps.header.words[layout.W_LOST]) for steps, _, _ in self.engines]
        return int(self.reader.header.words[layout.W_UNRECORDED]) + sum(lost)

    def is_dead(self) -> bool:
        if self.descriptor < 0:
            return False
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class MergedReader:
    """Every ring that was added, read together."""

    def __init__(self) -> None:
        self._processes: dict[str, _ProcessRings] = {}
        self._ring_numbers = iter(range(1, 1 << 31))
        self._pending: list[events.RecordedEvent] = []
        self._previous = 0
        self._checked_at = 0
        self._known_rings: set[str] = set()
        self.rejected: list[str] = []
        self._errors_before = self._unrecorded_before = 0
        self.has_seen_rings = False
        self.horizon = 0
        """Facts up to here were handed out."""
        self.fill_ratio = 0.0
        """The share of the ring that was filled most between the last two polls."""

    # ── finding rings ────────────────────────────────────────────────────────────────────────────────────────────

    def discover_rings(self, folder: Path, now: int, prefix: str = "") -> None:
        """Opens ring files that appeared, of all processes or of one; those that are no ring of ours are named in `refused`."""
        try:
            there = os.listdir(folder)
        except OSError:
            return
        names = sorted(name for name in there if name.startswith(prefix) and name.endswith(_SUFFIXES))
        for name in sorted(names, key=lambda n: n.endswith(layout.SUFFIX_STEPS)):
            key = os.path.join(folder, name)
            if key not in self._known_rings:
                self._open_ring(folder / name, key, now)

    def add_ring(self, name: str, memory: mmap.mmap, now: int) -> None:
        """Adds a ring in our own memory."""
        if name not in self._known_rings:
            self._register_ring(Path(name), name, memory, -1, None, now)

    def _open_ring(self, path: Path, key: str, now: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as refusal:
            if refusal.errno not in directory.RESOURCE_ERRNOS:
                self.rejected.append(f"{path.name}: {refusal.strerror}")
                self._known_rings.add(key)
            return
        try:
            if not os.fstat(descriptor).st_size:
                raise RingNotReady("empty")
            memory = mmap.mmap(descriptor, 0)
            self._register_ring(path, key, memory, descriptor, path, now)
        except RingNotReady:
            os.close(descriptor)
        except (InvalidRing, ValueError, OSError) as reason:
            os.close(descriptor)
            if not isinstance(reason, OSError) or reason.errno not in directory.RESOURCE_ERRNOS:
                self.rejected.append(f"{path.name}: {reason}")
                self._known_rings.add(key)

    def _register_ring(
        self, path: Path, key: str, memory: mmap.mmap, descriptor: int, file: Path | None, now: int
    ) -> None:
        prefix = path.name.removesuffix(layout.SUFFIX_REQUESTS).removesuffix(layout.SUFFIX_STEPS)
        if path.name.endswith(layout.SUFFIX_REQUESTS):
            requests = RequestReader(memory, next(self._ring_numbers))
            if requests.header.text.get("boot_id", "") != layout.read_boot_id():
                raise InvalidRing("of another boot")
            process = self._processes[prefix] = _ProcessRings(requests.ring, requests, descriptor, file)
            self._announce_process(process, now)
        else:
            owner = self._processes.get(prefix.rpartition("-")[0])
            if owner is None:
                raise RingNotReady("the ring of its process is not there yet")
            steps = StepReader(memory, next(self._ring_numbers), taken_over=owner.processed_until > 0)
            owner.engines.append((steps, descriptor, file))
            if owner.processed_until:
                owner.reported_unrecorded += int(steps.header.words[layout.W_LOST])
            log = prefix.rpartition("-")[2]
            number = int(log) if log.isdecimal() else 0
            said = events.EngineSeen(0, owner.ring, steps.header.pid, steps.engine, number)
            self._pending.append(events.RecordedEvent(steps.ring, 0, said))
        self._known_rings.add(key)
        self.has_seen_rings = True

    def _announce_process(self, process: _ProcessRings, now: int) -> None:
        header, concluded_at = process.reader.header, process.processed_until
        said = header.text
        seen = events.ProcessSeen(
            0, header.pid, str(said.get("role", "")), concluded_at, int(said.get("parent", 0))
        )
        self._pending.append(events.RecordedEvent(process.ring, 0, seen))
        if concluded_at:  # a reader before us died: arrivals may have been overwritten meanwhile
            self._pending += self._recover_live_requests(process, now)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self, now: int, final: bool = False) -> list[events.RecordedEvent]:
        """The facts up to the instant of the previous poll (`final`: all there are), ordered by time."""
        self.fill_ratio = 0.0
        for process in self._processes.values():
            found = self._poll_process(process, now, final)
            self.fill_ratio = max(
                self.fill_ratio, process.reader.fill_ratio, *(one.fill_ratio for one, _, _ in process.engines)
            )
            if found and isinstance(found[0].event, events.EventsLost):  # it is said before all else
                self._pending += self._recover_live_requests(process, now)
                self._add_live_list(process, max(now, _clock.now()))
        if now - self._checked_at > LIVENESS_NS or final:
            self._checked_at = now
            self._remove_dead_processes(now)
        return self._release_until(None if final else self._previous, now)

    def _poll_process(self, process: _ProcessRings, now: int, final: bool) -> list[events.RecordedEvent]:
        """Takes what there is of a process; what its requests' ring had."""
        # Steps first: whatever a step refers to was stated before it, so it is found in the requests read after.
        by_step = [fact for steps, _, _ in process.engines for fact in steps.poll(now, final)]
        found = list(process.reader.poll(now, final))
        self._pending += by_step
        self._pending += found
        if not process.was_alive:
            told = [said.event.at for said in by_step + found if not isinstance(said.event, _READER_EVENTS)]
            process.latest_event_at = max([process.latest_event_at, *told])
        return found

    def are_filled_above(self, share: float) -> bool:
        """Whether more than this share of a ring of requests was filled since the last poll."""
        return any(process.reader.is_filled_above(share) for process in self._processes.values())

    def add_event(self, said: events.RecordedEvent) -> None:
        """Hands out, in its turn, what was learned of a process otherwise than from its ring."""
        self._pending.append(said)

    def list_writers(self) -> list[tuple[int, int]]:
        """(ring, pid as seen from here) of the processes that live and can be seen; never of those in our own memory."""
        holders = [
            (p.ring, directory.find_lock_holder(p.descriptor))
            for p in self._processes.values()
            if p.descriptor >= 0
        ]
        return [(ring, pid) for ring, pid in holders if pid]

    def list_engine_threads(self) -> list[tuple[int, int, int, int]]:
        """(ring of steps, pid as seen from here, pid and thread as their process sees them) of the engines that live."""
        seen = dict(self.list_writers())
        return [
            (steps.ring, seen[process.ring], steps.header.pid, int(steps.header.words[layout.W_THREAD]))
            for process in self._processes.values()
            if process.ring in seen
            for steps, _, _ in process.engines
        ]

    def count_writers(self) -> int:
        """How many writers live."""
        return len(self._processes)

    def mark_processed(self, horizon: int) -> None:
        """Notes in every ring that what ended before `horizon` was handed on."""
        for process in self._processes.values():
            words = process.reader.header.words
            words[layout.W_PROCESSED_UNTIL] = max(np.uint64(max(horizon, 0)), words[layout.W_PROCESSED_UNTIL])

    def list_pending_flushes(self) -> list[tuple[int, int]]:
        """(process, request number) of every flush that a writer waits for."""
        asked = []
        for process in self._processes.values():
            words = process.reader.header.words
            if words[layout.W_FLUSH_REQUESTED] != words[layout.W_FLUSH_DONE]:
                asked.append((process.ring, int(words[layout.W_FLUSH_REQUESTED])))
        return asked

    def complete_flushes(self, asked: list[tuple[int, int]]) -> None:
        """Tells the writers that their flush is done."""
        numbers = dict(asked)
        for process in self._processes.values():
            if process.ring in numbers:
                process.reader.header.words[layout.W_FLUSH_DONE] = np.uint64(numbers[process.ring])

    def count_errors(self) -> int:
        """Probes that raised, in all processes that there were."""
        return self._errors_before + sum(
            one.count_errors() - one.reported_errors for one in self._processes.values()
        )

    def count_unrecorded(self) -> int:
        """Requests, engines and batches that no ring had room for, in all processes that there were."""
        processes = self._processes.values()
        return self._unrecorded_before + sum(
            one.count_unrecorded() - one.reported_unrecorded for one in processes
        )

    def close(self, remove: bool) -> None:
        """Lets go of everything; `remove` deletes the files of the living too."""
        for prefix in list(self._processes):
            self._drop_process(prefix, remove)

    def _release_until(self, upto: int | None, now: int) -> list[events.RecordedEvent]:
        self._pending.sort(key=_EVENT_TIME)
        cut = len(self._pending) if upto is None else bisect_right(self._pending, upto, key=_EVENT_TIME)
        released, self._pending = self._pending[:cut], self._pending[cut:]
        self.horizon = now if upto is None else upto
        self._previous = now
        return released

    def _add_live_list(self, process: _ProcessRings, at: int) -> None:
        """`at`: just before they are looked up. Who ended by then said so before, and that is handed out before this; who
        arrives meanwhile said so after."""
        listed = events.LiveListed(at, [handle for handle, _ in process.reader.read_live_requests()])
        self._pending.append(events.RecordedEvent(process.ring, 0, listed))

    def _recover_live_requests(self, process: _ProcessRings, now: int) -> Iterator[events.RecordedEvent]:
        for handle, recovered in process.reader.read_live_requests():
            yield events.RecordedEvent(process.ring, handle, recovered)

    def _remove_dead_processes(self, now: int) -> None:
        for prefix, process in list(self._processes.items()):
            if not process.is_dead():
                process.was_alive = True
                continue
            if process.path is not None:  # what it made last may not have been found yet
                self.discover_rings(process.path.parent, now, f"{prefix}-")
            self._poll_process(process, now, final=True)
            rings = {process.ring, *(steps.ring for steps, _, _ in process.engines)}
            told = (one for one in self._pending if one.ring in rings)
            last = [one.event.at for one in told if not isinstance(one.event, _READER_EVENTS)]
            # Who was dead when found may have been that for hours.
            seen_until = (
                now
                if process.was_alive
                else max(process.latest_event_at, process.processed_until) + LIVENESS_NS
            )
            died_at = max([min(now, seen_until), *last])  # it may have said something after `now`
            self._pending += self._recover_live_requests(process, now)
            self._add_live_list(process, died_at)  # of the others, the ends were overwritten
            self._pending.append(events.RecordedEvent(process.ring, 0, events.ProcessDied(died_at)))
            self._drop_process(prefix, remove=True)

    def _drop_process(self, prefix: str, remove: bool) -> None:
        process = self._processes.pop(prefix)
        self._errors_before += process.count_errors() - process.reported_errors
        self._unrecorded_before += process.count_unrecorded() - process.reported_unrecorded
        rings = [(process.descriptor, process.path), *((fd, path) for _, fd, path in process.engines)]
        for descriptor, path in rings:
            if descriptor >= 0:
                os.close(descriptor)
            if remove and path is not None:
                path.unlink(missing_ok=True)
                self._known_rings.discard(str(path))
