"""Compares the p95 of every stage on two tapes, and tests whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

MIN_REQUESTS = 20
"""Requests that each side needs for a verdict."""
WORKLOAD_RATIO = 1.25
"""Workloads differ if the median prompt or answer is longer by at least this factor."""
BOOTSTRAP_SAMPLES = 2000
MAX_VALUES_AT_ONCE = 1_000_000
"""Values drawn at a time, which bounds the memory."""
PERCENT = 95


class ComparisonRow(NamedTuple):
    """p95 in ms before and after.

    `low`, `high`: 95 % interval of the difference, by bootstrap; infinite = too few.
    """

    name: str
    before: float
    after: float
    low: float
    high: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the row for JSON. Infinite bounds become None, because JSON has no infinity."""
        bounds = {
            key: value if np.isfinite(value) else None
            for key, value in (("low", self.low), ("high", self.high))
        }
        return self._asdict() | bounds


def compare_requests(before: list[RequestRecord], after: list[RequestRecord]) -> list[ComparisonRow]:
    """Returns one row per latency and per stage that both tapes have."""
    rows = []
    generator = np.random.default_rng(0)
    for name, measure in _list_measures(before + after).items():
        old, new = ([values for r in records if (values := measure(r))] for records in (before, after))
        if old and new:
            rows.append(_compare_values(name, old, new, generator))
    return rows


def find_workload_changes(before: list[RequestRecord], after: list[RequestRecord]) -> list[str]:
    """Returns a warning if the median prompt or answer length differs, which makes the comparison unfair."""
    changes = []
    for name, field in (("prompt", "input_tokens"), ("answer", "output_tokens")):
        old, new = ([getattr(r, field) for r in records if getattr(r, field)] for records in (before, after))
        before_median, after_median = (float(np.median(tokens)) if tokens else 0.0 for tokens in (old, new))
        if min(before_median, after_median) and max(before_median, after_median) >= WORKLOAD_RATIO * min(
            before_median, after_median
        ):
            changes.append(
                f"the median {name} has {before_median:.0f} tokens before, {after_median:.0f} after: the workloads differ, so their times do too"
            )
    return changes


def _compare_values(
    name: str, old: list[list[int]], new: list[list[int]], generator: np.random.Generator
) -> ComparisonRow:
    old_p95, new_p95 = (float(np.percentile(np.concatenate(values), PERCENT)) / 1e6 for values in (old, new))
    if min(len(old), len(new)) < MIN_REQUESTS:
        return ComparisonRow(name, old_p95, new_p95, float("-inf"), float("inf"), "too few")
    differences = (_bootstrap_p95(new, generator) - _bootstrap_p95(old, generator)) / 1e6
    low, high = (float(value) for value in np.percentile(differences, (2.5, 97.5)))
    return ComparisonRow(
        name,
        old_p95,
        new_p95,
        low,
        high,
        "worse" if low > 0 else "better" if high < 0 else "no difference seen",
    )


def _bootstrap_p95(requests: list[list[int]], generator: np.random.Generator) -> Any:
    """Returns the p95 of `BOOTSTRAP_SAMPLES` samples of requests.

    A request is drawn with all of its values, because values of one request are correlated. The samples are
    drawn in batches, because all of them would not fit into memory.
    """
    owner = np.repeat(np.arange(len(requests)), [len(values) for values in requests])
    values = np.concatenate(requests)
    order = np.argsort(values)
    batch = max(MAX_VALUES_AT_ONCE // len(values), 1)
    counts = (min(batch, BOOTSTRAP_SAMPLES - done) for done in range(0, BOOTSTRAP_SAMPLES, batch))
    samples = (_draw_counts(len(requests), count, generator)[:, owner[order]] for count in counts)
    return np.concatenate([_weighted_percentile(values[order], times) for times in samples])


def _draw_counts(size: int, count: int, generator: np.random.Generator) -> Any:
    """Returns how often each of `size` requests is drawn, for `count` samples."""
    drawn = generator.integers(0, size, (count, size)) + np.arange(count)[:, None] * size
    return np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)


def _weighted_percentile(ordered: Any, times: Any) -> Any:
    """Returns per sample the percentile of sorted values, as `numpy.percentile` interpolates it.

    `times`: how often each sample holds each value.
    """
    cumulative = np.cumsum(times, axis=1)
    rank = (cumulative[:, -1] - 1) * PERCENT / 100
    low, high = (ordered[(cumulative <= at[:, None]).sum(axis=1)] for at in (np.floor(rank), np.ceil(rank)))
    return low + (high - low) * (rank - np.floor(rank))


def _list_measures(records: list[RequestRecord]) -> dict[str, Callable[[RequestRecord], list[int]]]:
    """Returns the measures by name; each returns the lengths of one request (ns).

    The latencies are of successful requests only, like those of the metrics.
    """
    names = [name for name in semconv.STAGES if any(record.find_stage(name) for record in records)]
    stage_measures = {name: _measure_stage(name) for name in names}
    return {
        "time to first token": lambda r: [r.ttft_ns] if r.ttft_ns and r.outcome == events.OK else [],
        "longest gap": lambda r: [r.summary.gap_max] if r.summary.gaps and r.outcome == events.OK else [],
        "end to end": lambda r: [r.duration_ns] if r.outcome == events.OK else [],
        **stage_measures,
    }


def _measure_stage(name: str) -> Callable[[RequestRecord], list[int]]:
    return lambda record: [s.ended_at - s.started_at for s in record.stages if s.name == name]
