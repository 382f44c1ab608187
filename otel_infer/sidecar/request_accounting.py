"""Keeps the ledger of a server: every offered request is exported, dismissed, open, or lost by reason.

The pipeline and the sender count the requests that they settle. The others are found by difference: a request
whose events were overwritten before they were read, or that an earlier sidecar had read when it was killed.
"""

from __future__ import annotations

from collections import deque

from otel_infer import semconv
from otel_infer.assembly.assembler import Assembler
from otel_infer.ringbuffer.ledger import RequestCounts, RequestLedger
from otel_infer.ringbuffer.merged_reader import MergedReader

TAKEOVER_NS = 3_000_000_000
"""Time in which a new sidecar reads what its predecessor left; what is missing then ended with that one."""

READ_DELAY = 2
"""Polls after which a request is certainly returned: complete at the first, read at the second, and released
with the instant of the second at the third.
"""


class RequestAccounting:
    """Accounts of one server's requests; `rings` and `assembler` are those of its pipeline."""

    def __init__(self, rings: MergedReader, assembler: Assembler) -> None:
        self.ledger: RequestLedger = rings.ledger
        self._rings, self._assembler = rings, assembler
        self._counts_before: RequestCounts | None = None
        self._settled_before = self.ledger.count_settled()
        self._has_predecessor = self.ledger.add_reader()
        self._began = 0
        self._recorded: deque[int] = deque([0, 0, 0], maxlen=READ_DELAY + 1)
        self._unseen = self._dismissed = self._not_converted = 0

    def snapshot_recorded(self) -> None:
        """Reads how many requests were recorded so far. To be called before each poll of the rings."""
        offered, not_recorded = self._rings.count_requests()
        self._recorded.append(offered - not_recorded)
        if self._has_predecessor and self._counts_before is None and offered:
            self._counts_before = self.ledger.read_counts(0, not_recorded)  # what is open stays open

    def count_unseen(self, now: int, final: bool) -> None:
        """Counts as lost the requests that must have been read by now and are not assembled.

        To be called after the events of a poll were assembled. `final`: the poll returned everything. `now`:
        monotonic ns.
        """
        self._began = self._began or now
        if self._rings.has_holes() and not final:
            self._recorded.extend([self._recorded[0]] * (READ_DELAY + 1))
        known = self._settled_before + self._assembler.requests_seen + self._unseen
        missing = self._recorded[-1 if final else 0] - known
        if missing > 0:
            is_takeover = self._has_predecessor and now - self._began < TAKEOVER_NS
            reason = semconv.LOSS_SIDECAR_ENDED if is_takeover else semconv.LOSS_EVENTS_OVERWRITTEN
            self._unseen += missing
            self.ledger.add_lost(reason, missing)

    def add_dismissed(self, is_redundant: bool) -> None:
        """Counts a request that is not to be exported."""
        self._dismissed += 1
        self.ledger.add_result(
            semconv.EXPORT_RESULT_REDUNDANT if is_redundant else semconv.EXPORT_RESULT_NOT_SAMPLED
        )

    def count_not_converted(self, concluded: int, passed_on: int) -> None:
        """Counts as lost what was concluded here and neither dismissed nor passed on, because of an error.

        `passed_on`: requests that the sampler holds and that exporters took, so far.
        """
        failed = concluded - passed_on - self._dismissed - self._not_converted
        if failed > 0:
            self._not_converted += failed
            self.ledger.add_lost(semconv.LOSS_NOT_CONVERTED, failed)

    def read_counts(self, own_only: bool = False) -> RequestCounts:
        """Returns the counts of the server since its start. `own_only`: without those of earlier sidecars."""
        counts = self.ledger.read_counts(*self._rings.count_requests())
        before = self._counts_before if own_only else None
        return counts if before is None else counts.subtract(before)
