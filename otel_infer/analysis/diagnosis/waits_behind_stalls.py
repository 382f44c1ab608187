"""Finds waits in a queue that exist because the requests ahead were stalled. Pure.

    with the stall      ████▒▒▒▒████            without it    ████████
    the next request    ░░░░░░░░░░░░████████                  ░░░░░░░░████████

The queue is served once more, in the same order and with the runs without their stalls (Lindley, "The theory of queues with
a single server", 1952; several places as Kiefer and Wolfowitz, 1955). Where the same calculation with the measured runs does
not return the measured waits, the queue is of another kind, and nothing is said of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.queueing import queue_interval, running_interval
from otel_infer.analysis.diagnosis.slow_requests import sum_cause_time
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

_OTHER_COMPLAINTS = (
    semconv.CAUSE_STARVED,
    semconv.CAUSE_THROTTLED,
    semconv.CAUSE_INTERFERENCE,
    semconv.CAUSE_PREEMPTION,
)
STALL_CAUSES = tuple(
    row.name
    for row in causes.CAUSE_TABLE
    if row.group == causes.GROUP_STALL and not row.is_warmup and row.name not in _OTHER_COMPLAINTS
)
"""Stalls of the process or of the thread that computes. A lack of cores, other requests and warm-up are other complaints."""
_MAX_MISFIT = 0.2
"""Share of the waiting time by which the waits of the calculation may differ from the measured ones."""
_MAX_SHARE_ABOVE = 0.02
"""Share of the time with runs in which more of them may be open than there are places: a run that ends as the next begins."""


def find_waits_behind_stalls(records: Sequence[RequestRecord]) -> Any:
    """Returns for each request the ns that it would have waited less in the queue without the stalls of others.

    Pauses of the process in its wait are no part of that: they are the stall's already.
    """
    behind = np.zeros(len(records))
    runs = np.array([running_interval(record) for record in records], np.int64).reshape(-1, 2)
    queues = np.array([queue_interval(record) for record in records], np.int64).reshape(-1, 2)
    has_waited = queues[:, 1] > queues[:, 0]
    queued = np.where(has_waited, queues[:, 0], runs[:, 0])
    begun = np.where(has_waited, queues[:, 1], runs[:, 0])
    ran = np.flatnonzero(runs[:, 1] > runs[:, 0])
    rows = ran[np.argsort(begun[ran], kind="stable")]
    waits, lengths = (begun - queued)[rows], (runs[:, 1] - begun)[rows]
    paused = np.array([_sum_pauses(records[row], queued[row], begun[row]) for row in rows], np.int64)
    stalls = [sum_cause_time(records[row], *STALL_CAUSES) for row in rows] - paused
    if not waits.sum() or not stalls.clip(0).sum():
        return behind
    places = _count_places(begun[rows], runs[rows, 1])
    expected = _serve(queued[rows], lengths, places)
    if np.abs(expected - waits).sum() > _MAX_MISFIT * waits.sum():
        return behind
    without = _serve(queued[rows], (lengths - stalls.clip(0)).clip(0), places)
    behind[rows] = (np.minimum(expected - without, waits) - paused).clip(0)
    return behind


def _sum_pauses(record: RequestRecord, begin: int, end: int) -> int:
    """Returns how long the process was paused in this time, ns."""
    return sum(
        max(min(pause.ended_at, end) - max(pause.started_at, begin), 0)
        for pause in record.pauses
        if pause.cause in STALL_CAUSES
    )


def _serve(queued: Any, lengths: Any, places: int) -> Any:
    """Returns the waits, ns, of requests that are served in this order by so many places."""
    free_at, waits = [0] * places, np.zeros(len(queued), np.int64)
    for i, (since, length) in enumerate(zip(queued.tolist(), lengths.tolist(), strict=True)):
        begin = max(since, free_at[0])
        heapq.heapreplace(free_at, begin + length)
        waits[i] = begin - since
    return waits


def _count_places(begins: Any, ends: Any) -> int:
    """Returns how many runs are open at a time, at most."""
    times = np.concatenate([begins, ends])
    changes = np.concatenate([np.ones(len(begins), int), -np.ones(len(ends), int)])
    order = np.lexsort((changes, times))
    counts, lengths = np.cumsum(changes[order])[:-1], np.diff(times[order])
    by_count = np.bincount(counts.clip(0), weights=lengths)
    by_count[0] = 0
    above = by_count[::-1].cumsum()[::-1]  # time with so many runs or more
    return int(np.flatnonzero(above > _MAX_SHARE_ABOVE * by_count.sum())[-1])
