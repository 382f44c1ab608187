"""Counts what became of every request of one server, in shared memory that outlives its sidecar.

    offered = exported + not sampled + redundant + open + lost by reason

Writers count what they offer, in the headers of their rings. The sidecar counts the rest here, and adds the
counts of rings that it removes. A file is one page of u64 words; only the holder of the sidecar's lock writes
it. Additions are atomic under the GIL, because nothing is called in between.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.config import private_files
from otel_infer.ringbuffer import directory, layout

log = logging.getLogger(__name__)

MAGIC = 0x4F54454C_4C454447  # "OTELLEDG"
_W_MAGIC, _W_READERS, _W_CLOSED_RING, _W_OFFERED, _W_NOT_RECORDED = range(5)
_FIRST_RESULT = 16
_FIRST_REASON = 32


class RequestCounts(NamedTuple):
    """The requests of a server by what became of them.

    `results`: by `semconv.EXPORT_RESULTS`. `lost`: by `semconv.REQUEST_LOSS_REASONS`.
    """

    offered: int
    results: dict[str, int]
    lost: dict[str, int]

    @property
    def open(self) -> int:
        """The requests that are in flight, or waiting to be sent."""
        return self.offered - sum(self.results.values()) - sum(self.lost.values())

    def subtract(self, before: RequestCounts) -> RequestCounts:
        """Returns what was counted since `before`."""
        return RequestCounts(
            self.offered - before.offered,
            {result: count - before.results[result] for result, count in self.results.items()},
            {reason: count - before.lost[reason] for reason, count in self.lost.items()},
        )


class RequestLedger:
    """The counts of one server; `memory` is one page. A page that is no ledger is emptied."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._page = memoryview(bytearray(layout.PAGE) if memory is None else memory)
        self._words = self._page.cast("Q")
        if self._words[_W_MAGIC] != MAGIC:
            self.reset()

    def reset(self) -> None:
        """Begins to count from 0, for another server in the same folder."""
        self._page[:] = bytes(layout.PAGE)
        self._words[_W_MAGIC] = MAGIC

    def add_reader(self) -> bool:
        """Counts a reader that begins; returns whether there was one before, which may have read requests."""
        self._words[_W_READERS] += 1
        return self._words[_W_READERS] > 1

    @property
    def restarts(self) -> int:
        """How many readers there were before the latest one."""
        return max(self._words[_W_READERS] - 1, 0)

    def add_result(self, result: str, requests: int = 1) -> None:
        """Counts requests that were exported, or that were not to be exported."""
        self._words[_FIRST_RESULT + semconv.EXPORT_RESULTS.index(result)] += requests

    def add_lost(self, reason: str, requests: int = 1) -> None:
        """Counts requests that were lost."""
        self._words[_FIRST_REASON + semconv.REQUEST_LOSS_REASONS.index(reason)] += requests

    def count_settled(self) -> int:
        """Returns how many requests the sidecars of this server have exported, dismissed or lost."""
        return sum(self._words[_FIRST_RESULT : _FIRST_RESULT + len(semconv.EXPORT_RESULTS)]) + sum(
            self._words[_FIRST_REASON : _FIRST_REASON + len(semconv.REQUEST_LOSS_REASONS)]
        )

    def close_ring(self, started_at: int, offered: int, not_recorded: int) -> None:
        """Adds the counts of a ring that is removed next. `started_at` (monotonic ns) identifies it.

        A reader that is killed in between leaves the ring's file; `is_closed` tells the next one.
        """
        self._words[_W_OFFERED] += offered
        self._words[_W_NOT_RECORDED] += not_recorded
        self._words[_W_CLOSED_RING] = started_at

    def is_closed(self, started_at: int) -> bool:
        """Returns whether the counts of this ring were added."""
        return bool(started_at) and self._words[_W_CLOSED_RING] == started_at

    @property
    def closed_counts(self) -> tuple[int, int]:
        """The requests offered to, and not recorded in, rings that were removed."""
        return self._words[_W_OFFERED], self._words[_W_NOT_RECORDED]

    def read_counts(self, offered: int, not_recorded: int) -> RequestCounts:
        """Returns the counts. `offered`, `not_recorded`: of all rings, removed ones among them."""
        results = {
            result: self._words[_FIRST_RESULT + index] for index, result in enumerate(semconv.EXPORT_RESULTS)
        }
        lost = {
            reason: self._words[_FIRST_REASON + index]
            for index, reason in enumerate(semconv.REQUEST_LOSS_REASONS)
        }
        lost[semconv.LOSS_NOT_RECORDED] += not_recorded
        settled = sum(results.values()) + sum(lost.values())
        # A server that is killed between writing an arrival and counting it has offered one more.
        return RequestCounts(max(offered, settled), results, lost)


def open_ledger(folder: Path) -> RequestLedger:
    """Returns the ledger of this server's folder, created if it is missing.

    Where that is impossible, for example on a full tmpfs, the requests are counted in this process only.
    """
    path = folder / directory.LEDGER_FILE
    try:
        descriptor = private_files.open_beside_rings(path, os.O_RDWR | os.O_CREAT)
        try:
            private_files.check_private(os.fstat(descriptor), path)
            os.posix_fallocate(descriptor, 0, layout.PAGE)
            return RequestLedger(mmap.mmap(descriptor, layout.PAGE))
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("requests are counted in this process only: %s", error)
        return RequestLedger()


def read_server_counts(folder: Path) -> RequestCounts:
    """Returns the counts of a living server, without changing anything; raises `OSError`.

    They change while they are read, so a request that is being settled may still count as open.
    """
    names = private_files.list_names(folder, any_owner=True)
    ledger = RequestLedger(bytearray(_read_page(folder / directory.LEDGER_FILE)))
    offered, not_recorded = ledger.closed_counts
    for name in names:
        if not name.endswith(layout.SUFFIX_REQUESTS):
            continue
        words = memoryview(_read_page(folder / name))[: layout.HEADER_WORDS * 8].cast("Q")
        if words[layout.W_VERSION] == layout.VERSION and not ledger.is_closed(words[layout.W_STARTED_AT]):
            offered += words[layout.W_OFFERED]
            not_recorded += words[layout.W_NOT_RECORDED]
    return ledger.read_counts(offered, not_recorded)


def _read_page(path: Path) -> bytes:
    """Returns the first page of a file beside rings, filled up with zeros; raises `OSError`."""
    descriptor = private_files.open_beside_rings(path, os.O_RDONLY, any_owner=True)
    try:
        private_files.check_private(os.fstat(descriptor), path)
        return os.read(descriptor, layout.PAGE).ljust(layout.PAGE, b"\0")
    finally:
        os.close(descriptor)
