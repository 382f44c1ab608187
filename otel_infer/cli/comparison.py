"""Two tapes side by side: the p95 of every stage before and after, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from otel_infer import facts, semconv
from otel_infer.records import RequestRecord

FEWEST = 8
"""Values on each side without which nothing is said."""
DRAWS = 2000
MOST_AT_ONCE = 1_000_000
"""Values drawn."""
PERCENT = 95


class Row(NamedTuple):
    """p95 in ms before and after; `low`, `high`: 95 % interval of the difference, by bootstrap."""

    name: str
    before: float
    after: float
    low: float
    high: float
    verdict: str

    def described(self) -> dict[str, Any]:
        """As JSON, which has no word for what is not bounded."""
        bounds = {
            key: value if np.isfinite(value) else None
            for key, value in (("low", self.low), ("high", self.high))
        }
        return self._asdict() | bounds


def compared(before: list[RequestRecord], after: list[RequestRecord]) -> list[Row]:
    """The three latencies, then the stages, as far as both tapes have them."""
    rows = []
    draw = np.random.default_rng(0)
    for name, of in _measures(before + after).items():
        one, two = (np.array([v for r in records for v in of(r)], float) / 1e6 for records in (before, after))
        if len(one) and len(two):
            rows.append(_row(name, one, two, draw))
    return rows


def _row(name: str, one: Any, two: Any, draw: np.random.Generator) -> Row:
    was, now = (float(np.percentile(values, PERCENT)) for values in (one, two))
    if min(len(one), len(two)) < FEWEST:
        return Row(name, was, now, float("-inf"), float("inf"), "too few")
    differences = _drawn(two, draw) - _drawn(one, draw)
    low, high = (float(value) for value in np.percentile(differences, (2.5, 97.5)))
    return Row(
        name, was, now, low, high, "worse" if low > 0 else "better" if high < 0 else "no difference seen"
    )


def _drawn(values: Any, draw: np.random.Generator) -> Any:
    """The p95 of so many samples, drawn some at a time: all of them at once would not fit into memory."""
    size = len(values)
    at_once = max(MOST_AT_ONCE // size, 1)
    rows = [min(at_once, DRAWS - done) for done in range(0, DRAWS, at_once)]
    samples = (values[draw.integers(0, size, (count, size))] for count in rows)
    return np.concatenate([np.percentile(sample, PERCENT, axis=1) for sample in samples])


def _measures(records: list[RequestRecord]) -> dict[str, Callable[[RequestRecord], list[int]]]:
    """ns of one request, by name; of latencies only those that ended well, as the metrics have it."""
    names = [name for name in semconv.STAGES if any(record.stage(name) for record in records)]
    of_stages = {name: _stage(name) for name in names}
    return {
        "time to first token": lambda r: [r.ttft_ns] if r.ttft_ns and r.outcome == facts.OK else [],
        "longest gap": lambda r: [r.summary.gap_max] if r.summary.gaps and r.outcome == facts.OK else [],
        "end to end": lambda r: [r.duration_ns] if r.outcome == facts.OK else [],
        **of_stages,
    }


def _stage(name: str) -> Callable[[RequestRecord], list[int]]:
    return lambda record: [s.ended_at - s.started_at for s in record.stages if s.name == name]
