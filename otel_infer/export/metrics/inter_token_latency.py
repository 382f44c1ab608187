"""Times between tokens on their way into a histogram: thousands are sorted and counted at once."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_rows import gaps_of
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.histograms import Histograms, Key, Source

TOGETHER = 8192
"""Gaps that are counted at once."""
_REQUEST_BITS = 16
MAX_REQUESTS = 1 << _REQUEST_BITS
_MAX_NS = 1 << 62 - _REQUEST_BITS


class _Waiting(NamedTuple):
    """Requests whose gaps are not counted yet, and the span that stands for each."""

    records: list[RequestRecord]
    sources: list[Source | None]


class Gaps:
    """Counts gaps into `histograms`, in s; what was added is in there after `count()`."""

    def __init__(self, histograms: Histograms) -> None:
        self._histograms = histograms
        self._waiting: dict[Key, _Waiting] = {}
        self._number = 0

    def add(self, key: Key, record: RequestRecord, source: Source | None) -> None:
        """The gaps of one request, for the point with these attributes."""
        waiting = self._waiting.setdefault(key, _Waiting([], []))
        waiting.records.append(record)
        waiting.sources.append(source)
        self._number += record.summary.gaps
        if self._number >= TOGETHER or len(waiting.records) == MAX_REQUESTS:
            self.count()

    def count(self) -> None:
        """Counts what waits."""
        for key, (records, sources) in self._waiting.items():
            lengths, owners = gaps_of(
                [record.steps for record in records if record.steps is not None],
                [record.telemetry_lost for record in records],
            )
            # One sort of integers orders the lengths and takes along whose they are.
            ordered = np.sort(np.minimum(lengths, _MAX_NS) << _REQUEST_BITS | owners)
            values = (ordered >> _REQUEST_BITS) / 1e9
            self._histograms.at(key).record_many(values, partial(_source, ordered, sources))
        self._waiting, self._number = {}, 0


def _source(ordered: Any, sources: list[Source | None], position: int) -> Source | None:
    return sources[int(ordered[position]) & MAX_REQUESTS - 1]
