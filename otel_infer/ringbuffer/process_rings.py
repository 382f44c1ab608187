"""The rings of one writing process, as their reader sees them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from otel_infer.config import private_files
from otel_infer.ringbuffer import directory, events, layout
from otel_infer.ringbuffer.python_threads import read_python_threads
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.step_reader import StepFile, StepReader


class ProcessRings:
    """Rings of one writing process; `descriptor` is −1 for rings in the reader's own memory."""

    def __init__(self, ring: int, reader: RequestReader, descriptor: int, path: Path | None) -> None:
        self.ring, self.reader, self.descriptor, self.path = ring, reader, descriptor, path
        self.step_files: list[StepFile] = []
        self.engines: list[StepReader] = []
        self.processed_until = reader.header.words[layout.W_PROCESSED_UNTIL]
        """Instant up to which an earlier reader exported requests; 0 = there was none."""
        self.latest_event_at = 0
        self.was_alive = False
        self.reported = self.read_counts() if self.processed_until else Counter[str]()
        """Counts that an earlier reader has reported."""
        self.is_counted = False
        """Whether the ledger has the requests of this ring, because an earlier reader was about to remove it."""

    @property
    def started_at(self) -> int:
        return self.reader.header.words[layout.W_STARTED_AT]

    def read_requests(self) -> tuple[int, int]:
        """Returns how many requests were offered to this ring, and how many of them were not recorded."""
        words = self.reader.header.words
        return (0, 0) if self.is_counted else (words[layout.W_OFFERED], words[layout.W_NOT_RECORDED])

    def read_counts(self) -> Counter[str]:
        """Returns what the writers of this process counted so far, see `MergedReader.counts`."""
        words = self.reader.header.words
        lost = sum(steps.header.words[layout.W_LOST] for steps in self.engines)
        return Counter(
            errors=words[layout.W_ERRORS],
            unrecorded=words[layout.W_UNRECORDED] + lost,
            values_cut=words[layout.W_VALUES_CUT],
        )

    @property
    def pending_flush(self) -> int:
        """Returns the number of the flush that the writer waits for; 0 = none."""
        words = self.reader.header.words
        is_pending = words[layout.W_FLUSH_REQUESTED] != words[layout.W_FLUSH_DONE]
        return words[layout.W_FLUSH_REQUESTED] if is_pending else 0

    def complete_flush(self, number: int, is_refused: bool) -> None:
        """Marks a flush of this process as done. `is_refused`: a receiver refused something of it."""
        words = self.reader.header.words
        if is_refused:
            words[layout.W_FLUSH_REFUSED] = number
        words[layout.W_FLUSH_DONE] = number

    @property
    def stacks_path(self) -> Path | None:
        """Returns the file that the stacks of this process are written to; None for rings in the reader's own memory."""
        return None if self.path is None else self.path.with_suffix(layout.SUFFIX_STACKS)

    def find_pid(self) -> int:
        """Returns the pid of the process as seen from here; 0 = not visible, or rings in this process's memory."""
        return directory.find_lock_holder(self.descriptor) if self.descriptor >= 0 else 0

    def list_request_threads(self) -> list[tuple[int, int, int, int]]:
        """Returns the threads that worked for a request last, at most 64, in the form of `list_engine_threads`."""
        table = bytes(memoryview(self.reader.memory)[layout.THREADS_AT : layout.PAGE])
        threads = set(np.frombuffer(table, np.uint64)[1 :: layout.THREAD_WORDS].tolist()) - {0}
        pid = self.find_pid() if threads else 0
        return [(self.ring, pid, self.reader.header.pid, thread) for thread in threads if pid]

    def list_python_threads(self) -> list[tuple[int, int]]:
        """Returns (pid as seen from here, thread id as the process sees it) of threads that Python started, at most 128."""
        threads = read_python_threads(self.reader.memory)
        pid = self.find_pid() if threads else 0
        return [(pid, thread) for thread in sorted(threads) if pid]

    def is_dead(self) -> bool:
        if self.descriptor < 0:
            return False
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def recover_live_requests(self) -> Iterator[events.RecordedEvent]:
        """Yields the arrivals of the requests in flight, as far as the live table has them."""
        for handle, recovered in self.reader.read_live_requests():
            yield events.RecordedEvent(self.ring, handle, recovered)

    def list_live_requests(self, at: int) -> events.RecordedEvent:
        """Returns the handles in the live table; `at` is just before the table is read.

        A request that ended before `at` has recorded its end earlier, and the end is returned before this
        list. A request that arrives meanwhile records its arrival after it.
        """
        listed = events.LiveListed(at, [handle for handle, _ in self.reader.read_live_requests()])
        return events.RecordedEvent(self.ring, 0, listed)

    def close_files(self, remove: bool) -> list[str]:
        """Closes the files, and returns the paths of those that it removed."""
        files = [(self.descriptor, self.path), *((file.descriptor, file.path) for file in self.step_files)]
        if self.stacks_path is not None and remove:
            with contextlib.suppress(OSError):
                private_files.remove_beside_rings(self.stacks_path)
        removed = []
        for descriptor, path in files:
            if descriptor >= 0:
                os.close(descriptor)
            if remove and path is not None:
                with contextlib.suppress(OSError):  # its folder is gone, or another folder has its name
                    private_files.remove_beside_rings(path)
                removed.append(str(path))
        return removed
