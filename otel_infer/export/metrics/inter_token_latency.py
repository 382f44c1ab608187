"""Times between tokens on their way into a histogram: thousands are sorted and counted at once."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_rows import compute_token_gaps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.histograms import ExemplarSource, HistogramSeries, Key

GAPS_PER_FLUSH = 8192
"""Gaps that are counted at once."""
_REQUEST_BITS = 16
MAX_REQUESTS = 1 << _REQUEST_BITS
_MAX_NS = 1 << 62 - _REQUEST_BITS


class _PendingRequests(NamedTuple):
    """Requests whose gaps are not counted yet, and the span that stands for each."""

    records: list[RequestRecord]
    sources: list[ExemplarSource | None]


class InterTokenLatency:
    """Counts gaps into `histograms`, in s; what was added is in there after `count()`."""

    def __init__(self, histograms: HistogramSeries) -> None:
        self._histograms = histograms
        self._pending: dict[Key, _PendingRequests] = {}
        self._gap_count = 0

    def add_request(self, key: Key, record: RequestRecord, source: ExemplarSource | None) -> None:
        """The gaps of one request, for the point with these attributes."""
        waiting = self._pending.setdefault(key, _PendingRequests([], []))
        waiting.records.append(record)
        waiting.sources.append(source)
        self._gap_count += record.summary.gaps
        if self._gap_count >= GAPS_PER_FLUSH or len(waiting.records) == MAX_REQUESTS:
            self.record_pending()

    def record_pending(self) -> None:
        """Counts what waits."""
        for key, (records, sources) in self._pending.items():
            lengths, owners = compute_token_gaps(
                [record.steps for record in records if record.steps is not None],
                [record.telemetry_lost for record in records],
            )
            # One sort of integers orders the lengths and takes along whose they are.
            ordered = np.sort(np.minimum(lengths, _MAX_NS) << _REQUEST_BITS | owners)
            values = (ordered >> _REQUEST_BITS) / 1e9
            self._histograms.get_or_create(key).record_many(values, partial(_source_at, ordered, sources))
        self._pending, self._gap_count = {}, 0


def _source_at(ordered: Any, sources: list[ExemplarSource | None], position: int) -> ExemplarSource | None:
    return sources[int(ordered[position]) & MAX_REQUESTS - 1]
