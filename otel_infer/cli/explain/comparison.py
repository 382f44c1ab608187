"""Two tapes side by side: the p95 of every stage before and after, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

MIN_REQUESTS = 20
"""Requests on each side without which nothing is said."""
WORKLOAD_RATIO = 1.25
"""So many times as long at the median, prompts or answers are not alike."""
BOOTSTRAP_SAMPLES = 2000
MAX_VALUES_AT_ONCE = 1_000_000
"""Values drawn."""
PERCENT = 95


class ComparisonRow(NamedTuple):
    """p95 in ms before and after; `low`, `high`: 95 % interval of the difference, by bootstrap."""

    name: str
    before: float
    after: float
    low: float
    high: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which has no word for what is not bounded."""
        bounds = {
            key: value if np.isfinite(value) else None
            for key, value in (("low", self.low), ("high", self.high))
        }
        return self._asdict() | bounds


def compare_requests(before: list[RequestRecord], after: list[RequestRecord]) -> list[ComparisonRow]:
    """The three latencies, then the stages, as far as both tapes have them."""
    rows = []
    draw = np.random.default_rng(0)
    for name, of in _list_measures(before + after).items():
        one, two = ([values for r in records if (values := of(r))] for records in (before, after))
        if one and two:
            rows.append(_compare_values(name, one, two, draw))
    return rows


def find_workload_changes(before: list[RequestRecord], after: list[RequestRecord]) -> list[str]:
    """What is to be known before the rest is believed: that other requests were asked."""
    said = []
    for name, of in (("prompt", "input_tokens"), ("answer", "output_tokens")):
        one, two = ([getattr(r, of) for r in records if getattr(r, of)] for records in (before, after))
        was, now = (float(np.median(tokens)) if tokens else 0.0 for tokens in (one, two))
        if min(was, now) and max(was, now) >= WORKLOAD_RATIO * min(was, now):
            said.append(
                f"the median {name} has {was:.0f} tokens before, {now:.0f} after: other requests take other times"
            )
    return said


def _compare_values(
    name: str, one: list[list[int]], two: list[list[int]], draw: np.random.Generator
) -> ComparisonRow:
    was, now = (float(np.percentile(np.concatenate(values), PERCENT)) / 1e6 for values in (one, two))
    if min(len(one), len(two)) < MIN_REQUESTS:
        return ComparisonRow(name, was, now, float("-inf"), float("inf"), "too few")
    differences = (_bootstrap_p95(two, draw) - _bootstrap_p95(one, draw)) / 1e6
    low, high = (float(value) for value in np.percentile(differences, (2.5, 97.5)))
    return ComparisonRow(
        name, was, now, low, high, "worse" if low > 0 else "better" if high < 0 else "no difference seen"
    )


def _bootstrap_p95(requests: list[list[int]], draw: np.random.Generator) -> Any:
    """The p95 of so many samples of requests, each with all of its values, since those are like each other.

    Drawn some at a time: all of them at once would not fit into memory.
    """
    owner = np.repeat(np.arange(len(requests)), [len(values) for values in requests])
    values = np.concatenate(requests)
    order = np.argsort(values)
    at_once = max(MAX_VALUES_AT_ONCE // len(values), 1)
    counts = (min(at_once, BOOTSTRAP_SAMPLES - done) for done in range(0, BOOTSTRAP_SAMPLES, at_once))
    samples = (_draw_counts(len(requests), count, draw)[:, owner[order]] for count in counts)
    return np.concatenate([_weighted_percentile(values[order], times) for times in samples])


def _draw_counts(size: int, count: int, draw: np.random.Generator) -> Any:
    """How often each of so many is drawn, in so many samples."""
    drawn = draw.integers(0, size, (count, size)) + np.arange(count)[:, None] * size
    return np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)


def _weighted_percentile(ordered: Any, times: Any) -> Any:
    """As `numpy.percentile` has it, of ordered values of which each sample has each so many times."""
    upto = np.cumsum(times, axis=1)
    rank = (upto[:, -1] - 1) * PERCENT / 100
    low, high = (ordered[(upto <= at[:, None]).sum(axis=1)] for at in (np.floor(rank), np.ceil(rank)))
    return low + (high - low) * (rank - np.floor(rank))


def _list_measures(records: list[RequestRecord]) -> dict[str, Callable[[RequestRecord], list[int]]]:
    """ns of one request, by name; of latencies only those that ended well, as the metrics have it."""
    names = [name for name in semconv.STAGES if any(record.find_stage(name) for record in records)]
    of_stages = {name: _measure_stage(name) for name in names}
    return {
        "time to first token": lambda r: [r.ttft_ns] if r.ttft_ns and r.outcome == events.OK else [],
        "longest gap": lambda r: [r.summary.gap_max] if r.summary.gaps and r.outcome == events.OK else [],
        "end to end": lambda r: [r.duration_ns] if r.outcome == events.OK else [],
        **of_stages,
    }


def _measure_stage(name: str) -> Callable[[RequestRecord], list[int]]:
    return lambda record: [s.ended_at - s.started_at for s in record.stages if s.name == name]
