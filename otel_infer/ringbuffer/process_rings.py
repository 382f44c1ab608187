"""The rings of one writing process, as their reader sees them."""

from __future__ import annotations

import fcntl
from collections import Counter
from pathlib import Path

import numpy as np

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.step_reader import StepFile, StepReader


class ProcessRings:
    """Rings of one writing process; `descriptor` is −1 for rings in the reader's own memory."""

    def __init__(self, ring: int, reader: RequestReader, descriptor: int, path: Path | None) -> None:
        self.ring, self.reader, self.descriptor, self.path = ring, reader, descriptor, path
        self.step_files: list[StepFile] = []
        self.engines: list[StepReader] = []
        self.processed_until = int(reader.header.words[layout.W_PROCESSED_UNTIL])
        """Instant up to which an earlier reader exported requests; 0 = there was none."""
        self.latest_event_at = 0
        self.was_alive = False
        self.reported = self.read_counts() if self.processed_until else Counter[str]()
        """Counts that an earlier reader has reported."""
        self.is_counted = False
        """Whether the ledger has the requests of this ring, because an earlier reader was about to remove it."""

    @property
    def started_at(self) -> int:
        return int(self.reader.header.words[layout.W_STARTED_AT])

    def read_requests(self) -> tuple[int, int]:
        """Returns how many requests were offered to this ring, and how many of them were not recorded."""
        words = self.reader.header.words
        return (
            (0, 0) if self.is_counted else (int(words[layout.W_OFFERED]), int(words[layout.W_NOT_RECORDED]))
        )

    def read_counts(self) -> Counter[str]:
        """Returns what the writers of this process counted so far, see `MergedReader.counts`."""
        words = self.reader.header.words
        lost = sum(int(steps.header.words[layout.W_LOST]) for steps in self.engines)
        return Counter(
            errors=int(words[layout.W_ERRORS]),
            unrecorded=int(words[layout.W_UNRECORDED]) + lost,
            values_cut=int(words[layout.W_VALUES_CUT]),
        )

    @property
    def pending_flush(self) -> int:
        """Returns the number of the flush that the writer waits for; 0 = none."""
        words = self.reader.header.words
        is_pending = words[layout.W_FLUSH_REQUESTED] != words[layout.W_FLUSH_DONE]
        return int(words[layout.W_FLUSH_REQUESTED]) if is_pending else 0

    def complete_flush(self, number: int, is_refused: bool) -> None:
        """Marks a flush of this process as done. `is_refused`: a receiver refused something of it."""
        words = self.reader.header.words
        if is_refused:
            words[layout.W_FLUSH_REFUSED] = np.uint64(number)
        words[layout.W_FLUSH_DONE] = np.uint64(number)

    def is_dead(self) -> bool:
        if self.descriptor < 0:
            return False
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
