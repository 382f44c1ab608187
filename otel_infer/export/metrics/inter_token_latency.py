"""Collects the gaps between tokens for a histogram, and sorts and counts thousands of them at a time."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_rows import RequestSteps, compute_token_gaps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.histograms import ExemplarSource, HistogramSeries, Key

GAPS_PER_FLUSH = 8192
"""Gaps that are counted at a time."""
_REQUEST_BITS = 16
MAX_REQUESTS = 1 << _REQUEST_BITS
_MAX_NS = 1 << 62 - _REQUEST_BITS


class _PendingRequests(NamedTuple):
    """Requests whose gaps are not counted yet, and the exemplar source of each."""

    records: list[RequestRecord]
    tables: list[RequestSteps]
    sources: list[ExemplarSource | None]


class InterTokenLatency:
    """Counts gaps into `histograms`, in s. Added requests are counted by `record_pending()`."""

    def __init__(self, histograms: HistogramSeries) -> None:
        self._histograms = histograms
        self._pending: dict[Key, _PendingRequests] = {}
        self._gap_count = 0

    def add_request(self, key: Key, record: RequestRecord, source: ExemplarSource | None) -> None:
        """Adds the gaps of one request with steps, for the series with this key."""
        assert record.steps is not None
        waiting = self._pending.setdefault(key, _PendingRequests([], [], []))
        waiting.records.append(record)
        waiting.tables.append(record.steps)
        waiting.sources.append(source)
        self._gap_count += record.summary.gaps
        if self._gap_count >= GAPS_PER_FLUSH or len(waiting.records) == MAX_REQUESTS:
            self.record_pending()

    def record_pending(self) -> None:
        """Counts the gaps of all pending requests."""
        for key, (records, tables, sources) in self._pending.items():
            gaps, owners = compute_token_gaps(tables, [record.telemetry_lost for record in records])
            # The low bits hold the request of a gap, so that one sort of integers orders both.
            ordered = np.sort(np.minimum(gaps, _MAX_NS) << _REQUEST_BITS | owners)
            values = (ordered >> _REQUEST_BITS) / 1e9
            self._histograms.get_or_create(key).record_many(values, partial(_source_at, ordered, sources))
        self._pending, self._gap_count = {}, 0


def _source_at(ordered: Any, sources: list[ExemplarSource | None], position: int) -> ExemplarSource | None:
    return sources[int(ordered[position]) & MAX_REQUESTS - 1]
