"""Finds the steps of requests that are over, for many requests in one call. Pure.

A column of the tables belongs to one step of one request. Whole groups of requests are processed together,
because numpy's cost per call would otherwise dominate the cost of a request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

_EMPTY = np.empty((6, 0), np.int64)
_NEVER = 1 << 62


class DeliveredSteps(NamedTuple):
    """The steps that delivered something to a request.

    `evicted`: further steps that are no longer in the step log. `is_last_known`: the last row is certainly
    the last step. `tokens`: of all rows. `ended_at`: of the last row.
    """

    rows: RequestSteps
    evicted: int
    is_last_known: bool
    tokens: int
    ended_at: int


class _RunSegment(NamedTuple):
    """The steps of a run that are still in the step log. Their columns in the common table are `begin`..`end`."""

    owner: int
    log: EngineStepLog
    first: int
    last: int
    sequences: int
    begin: int
    end: int


def collect_steps(
    requests: Sequence[OpenRequest], records: Sequence[RequestRecord], first_at: Sequence[int]
) -> list[DeliveredSteps]:
    """Returns the delivered steps of each request. `first_at`: its first token; 0 = not known."""
    segments, evicted = _split_runs(requests)
    if not segments:
        return [DeliveredSteps(RequestSteps(_EMPTY), count, False, 0, 0) for count in evicted]
    columns = [
        view for segment in segments for view in segment.log.table.get_columns(segment.first, segment.last)
    ]
    table = np.concatenate(columns, axis=1)
    counts = np.array([segment.end - segment.begin for segment in segments])
    seen = _fill_request_columns(table, segments, counts, requests)
    known = _find_known_ends(table, segments, seen, requests)
    owner = np.repeat(np.array([segment.owner for segment in segments]), counts)
    table, owner = _clip_to_requests(table, owner, seen, _build_limits(requests, records, first_at))
    bounds = np.searchsorted(owner, np.arange(len(requests) + 1))
    tokens = np.diff(np.append(0, np.cumsum(table[RequestSteps.TOKENS]))[bounds])
    last = np.append(0, table[RequestSteps.ENDED_AT])[bounds[1:]]
    per_request = zip(bounds.tolist(), bounds[1:].tolist(), evicted, known, tokens.tolist(), last.tolist())
    return [DeliveredSteps(RequestSteps(table[:, begin:end]), *values) for begin, end, *values in per_request]


def _split_runs(requests: Sequence[OpenRequest]) -> tuple[list[_RunSegment], list[int]]:
    """Returns the segments of all requests, request after request, and the number of evicted steps of each."""
    segments: list[_RunSegment] = []
    evicted = [0] * len(requests)
    begin = 0
    for owner, request in enumerate(requests):
        for log, began, last, sequences in request.runs:
            first = max(began, log.table.oldest)
            evicted[owner] += min(first, last + 1) - began
            if first <= last:
                end = begin + last - first + 1
                segments.append(_RunSegment(owner, log, first, last, sequences, begin, end))
                begin = end
    return segments, evicted


def _fill_request_columns(
    table: Any, segments: list[_RunSegment], counts: Any, requests: Sequence[OpenRequest]
) -> Any:
    """Writes the values of each request into the table. Returns which columns delivered something to it."""
    table[RequestSteps.TOKENS] = np.repeat(np.array([segment.sequences for segment in segments]), counts)
    token_changes: dict[int, int] = {}
    prefill_changes: dict[int, int] = {}
    steps_with_changes: dict[tuple[int, EngineStepLog], tuple[list[int], list[int]]] = {}
    for owner, log, first, last, _, begin, _ in segments:
        deltas, chunks = requests[owner].token_deltas.get(log, {}), requests[owner].chunks.get(log, {})
        if not (deltas or chunks):
            continue
        if (owner, log) not in steps_with_changes:  # sorted once, because there may be as many runs as steps
            steps_with_changes[owner, log] = sorted(deltas), sorted(chunks)
        delta_steps, chunk_steps = steps_with_changes[owner, log]
        for step in _steps_between(delta_steps, first, last):
            token_changes[begin + step - first] = deltas[step]
        for step in _steps_between(chunk_steps, first, last):
            prefill_changes[begin + step - first] = -chunks[step].tokens
    for row, changes in (
        (RequestSteps.TOKENS, token_changes),
        (RequestSteps.OTHERS_PREFILL_TOKENS, prefill_changes),
    ):
        if changes:
            table[row, list(changes)] += np.array(list(changes.values()))
    # In place of a missing step, the step log holds an older one.
    firsts = np.repeat(np.array([segment.first for segment in segments]), counts)
    seen: Any = (table[RequestSteps.TOKENS] > 0) & (table[RequestSteps.STEP] >= firsts)
    seen &= table[RequestSteps.ENDED_AT] > 0
    return seen


def _steps_between(steps: list[int], first: int, last: int) -> list[int]:
    return steps[bisect_left(steps, first) : bisect_right(steps, last)]


def _find_known_ends(
    table: Any, segments: list[_RunSegment], seen: Any, requests: Sequence[OpenRequest]
) -> list[bool]:
    """Returns for each request whether its last observed step with a token is certainly the last one."""
    known = [False] * len(requests)
    has_rows = np.logical_or.reduceat(seen, [segment.begin for segment in segments]).tolist()
    for segment, has_row in zip(segments, has_rows):
        request = requests[segment.owner]
        if has_row and not request.steps_lost:
            known[segment.owner] = True
        elif has_row:
            # A later run of the same engine overrides this one.
            steps = table[RequestSteps.STEP, segment.begin : segment.end][seen[segment.begin : segment.end]]
            known[segment.owner] = request.is_last(segment.log, int(steps[-1]))
    return known


def _build_limits(
    requests: Sequence[OpenRequest], records: Sequence[RequestRecord], first_at: Sequence[int]
) -> Any:
    """Returns limits by request, one line each: arrival, end, first token, latest start and end of steps.

    A client receives no token before the step is done. If a success ended before its last step was recorded
    as done, that record was late.
    """
    limits = []
    for request, record, first in zip(requests, records, first_at):
        ended, until = record.ended_at, request.concluded_at
        begun, done = (ended, until) if record.outcome == events.OK else (_NEVER, min(ended, until))
        limits.append((record.arrived_at, ended, first, begun, done))
    return np.array(limits).T


def _clip_to_requests(table: Any, owner: Any, seen: Any, limits: Any) -> tuple[Any, Any]:
    """Returns the steps that the client could have received tokens from, clipped to the request.

    A step that was scheduled before the first token (two are in flight) counts from the first token on.
    """
    arrived, ended, first, begun, done = _repeat_per_step(limits, owner)
    started_at, ended_at = table[RequestSteps.STARTED_AT], table[RequestSteps.ENDED_AT]
    inside = seen & (started_at < begun) & (ended_at > arrived) & (ended_at <= done)
    if not inside.all():
        table, owner = table.compress(inside, axis=1), owner[inside]
        arrived, ended, first = _repeat_per_step(limits[:3], owner)
        started_at, ended_at = table[RequestSteps.STARTED_AT], table[RequestSteps.ENDED_AT]
    np.minimum(ended_at, ended, out=ended_at)
    np.maximum(started_at, arrived, out=started_at)
    same = owner[1:] == owner[:-1]
    # Steps of several engines are ordered by their ends.
    if (same & (ended_at[1:] < ended_at[:-1])).any():
        table = table[:, np.lexsort((ended_at, owner))]
        started_at, ended_at = table[RequestSteps.STARTED_AT], table[RequestSteps.ENDED_AT]
    is_before = ended_at <= first
    np.maximum(started_at, first, out=started_at, where=~is_before)
    # Where the first step is unknown, the first token is the limit: steps before it are no decode steps.
    is_dropped = is_before[1:] & same
    if not is_dropped.any():
        return table, owner
    is_kept = np.append(~is_dropped, True)
    return table.compress(is_kept, axis=1), owner[is_kept]


def _repeat_per_step(lines: Any, owner: Any) -> Any:
    """Repeats each request's numbers for each of its steps. `owner`: sorted."""
    bounds = np.searchsorted(owner, np.arange(lines.shape[1] + 1))
    return np.repeat(lines, np.diff(bounds), axis=1)
