"""Finds waits in a queue while its workers run code other than the model, which is then the reason of the wait. Pure.

    one batch       takes items ─ code ─ call of the model ─ code ─ takes items
    another item    ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░▏
                                  ▲ before the engine        ▲ after the model

Such a wait belongs to the complaint about that code: more workers would not make it shorter than faster code does. While a
model is called, or the process or its event loop stands still, the wait has another reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.queueing import merge_intervals, overlap_lengths, running_interval
from otel_infer.analysis.diagnosis.slow_requests import NS_PER_MS
from otel_infer.assembly.records.request import RequestRecord

_NOTICEABLE_MS = 10
"""Mean wait below which it is no evidence."""
_WAITS = (semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT)
Intervals = list[tuple[int, int]]


class WaitsForCode(NamedTuple):
    """For each request, the ns that it waited for a worker's code `before` and `after` a call of the model."""

    before: Any
    after: Any

    def sum_of(self, rows: Sequence[int]) -> float:
        """Returns the ns of these rows, before and after the model."""
        return float(self.before[rows].sum() + self.after[rows].sum())


def find_waits_for_code(records: Sequence[RequestRecord]) -> WaitsForCode:
    """Returns the time in which these requests waited in a queue for code of the worker that takes from it."""
    waits = [_list_stages(record, semconv.SPAN_QUEUE_WAIT) for record in records]
    if not any(waits):
        return WaitsForCode(np.zeros(len(records)), np.zeros(len(records)))
    before: Intervals = []
    after: Intervals = []
    other: Intervals = []
    for record in records:
        taken_at = max([end for _, end in _list_stages(record, *_WAITS)], default=0)
        begin, end = running_interval(record)
        other.append((begin, end))
        other += [(pause.started_at, pause.ended_at) for pause in (*record.pauses, *record.loop_pauses)]
        if taken_at and begin < end:
            before.append((taken_at, begin))
            after.append((end, record.ended_at))
    covered = [
        _sum_overlaps(waits, intervals) for intervals in (other, other + before, other + before + after)
    ]
    return WaitsForCode(covered[1] - covered[0], covered[2] - covered[1])


def describe_waits(lengths: Any) -> list[str]:
    """Returns evidence that requests wait for a worker's code; none where it is short. `lengths`: ns of each request."""
    mean_ms = float(np.mean(lengths)) / NS_PER_MS if len(lengths) else 0.0
    if mean_ms < _NOTICEABLE_MS:
        return []
    return [f"the slowest wait {mean_ms:.0f} ms each in the queue while a worker runs this code for others"]


def _list_stages(record: RequestRecord, *names: str) -> Intervals:
    return [(stage.started_at, stage.ended_at) for stage in record.stages if stage.name in names]


def _sum_overlaps(waits: Sequence[Intervals], intervals: Iterable[Sequence[int]]) -> Any:
    """Returns for each request how much of its waits is covered by these intervals, ns."""
    merged = merge_intervals(intervals)
    flat = np.array([wait for of_request in waits for wait in of_request], np.int64).reshape(-1, 2)
    owners = np.repeat(np.arange(len(waits)), [len(of_request) for of_request in waits])
    return np.bincount(owners, weights=overlap_lengths(flat, merged), minlength=len(waits))
