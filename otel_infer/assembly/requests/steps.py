"""Which steps requests that are over took part in, for many requests at once. Pure.

Every line of the tables here belongs to one step of one request; columns of whole groups of requests are worked on
together, since numpy's price per call would otherwise be most of what a request costs.
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
    """Steps that delivered something to a request. `forgotten`: how many more there were, that nobody remembers.

    `is_last_known`: whether the last of them is the last there was. `tokens`: of all of them; `ended_at`: of the last.
    """

    rows: RequestSteps
    evicted: int
    is_last_known: bool
    tokens: int
    ended_at: int


class _RunSegment(NamedTuple):
    """Steps of one request in one run that are all remembered, or missing. They are `at`..`end` in the table of all."""

    owner: int
    log: EngineStepLog
    first: int
    last: int
    sequences: int
    at: int
    end: int


def collect_steps(
    requests: Sequence[OpenRequest], records: Sequence[RequestRecord], first_at: Sequence[int]
) -> list[DeliveredSteps]:
    """The part of each request; `first_at`: when it had its first token, as far as is known, or else 0."""
    pieces, forgotten = _split_runs(requests)
    if not pieces:
        return [DeliveredSteps(RequestSteps(_EMPTY), lost, False, 0, 0) for lost in forgotten]
    columns = [part for piece in pieces for part in piece.log.table.get_columns(piece.first, piece.last)]
    table = np.concatenate(columns, axis=1)
    counts = np.array([piece.end - piece.at for piece in pieces])
    seen = _fill_request_columns(table, pieces, counts, requests)
    known = _find_known_ends(table, pieces, seen, requests)
    owner = np.repeat(np.array([piece.owner for piece in pieces]), counts)
    table, owner = _clip_to_requests(table, owner, seen, _build_limits(requests, records, first_at))
    bounds = np.searchsorted(owner, np.arange(len(requests) + 1))
    tokens = np.diff(np.append(0, np.cumsum(table[RequestSteps.TOKENS]))[bounds])
    last = np.append(0, table[RequestSteps.ENDED_AT])[bounds[1:]]
    each = zip(bounds.tolist(), bounds[1:].tolist(), forgotten, known, tokens.tolist(), last.tolist())
    return [DeliveredSteps(RequestSteps(table[:, begin:end]), *of_it) for begin, end, *of_it in each]


def _split_runs(requests: Sequence[OpenRequest]) -> tuple[list[_RunSegment], list[int]]:
    """The runs of all requests, request by request, and how many steps of each are no longer remembered."""
    pieces: list[_RunSegment] = []
    forgotten = [0] * len(requests)
    at = 0
    for owner, request in enumerate(requests):
        for log, begin, last, sequences in request.runs:
            first = max(begin, log.table.oldest)
            forgotten[owner] += min(first, last + 1) - begin
            if first <= last:
                end = at + last - first + 1
                pieces.append(_RunSegment(owner, log, first, last, sequences, at, end))
                at = end
    return pieces, forgotten


def _fill_request_columns(
    table: Any, pieces: list[_RunSegment], counts: Any, requests: Sequence[OpenRequest]
) -> Any:
    """Writes into the table what is each request's own; returns which rows delivered something to it."""
    table[RequestSteps.TOKENS] = np.repeat(np.array([piece.sequences for piece in pieces]), counts)
    more: dict[int, int] = {}
    own: dict[int, int] = {}
    said: dict[tuple[int, EngineStepLog], tuple[list[int], list[int]]] = {}
    for owner, log, first, last, _, at, _ in pieces:
        deltas, chunks = requests[owner].token_deltas.get(log, {}), requests[owner].chunks.get(log, {})
        if not (deltas or chunks):
            continue
        if (owner, log) not in said:  # its runs may be as many as its steps
            said[owner, log] = sorted(deltas), sorted(chunks)
        of_deltas, of_chunks = said[owner, log]
        for step in _steps_between(of_deltas, first, last):
            more[at + step - first] = deltas[step]
        for step in _steps_between(of_chunks, first, last):
            own[at + step - first] = -chunks[step].tokens
    for line, changes in ((RequestSteps.TOKENS, more), (RequestSteps.OTHERS_PREFILL_TOKENS, own)):
        if changes:
            table[line, list(changes)] += np.array(list(changes.values()))
    # Where a step is missing, its place holds an older one.
    firsts = np.repeat(np.array([piece.first for piece in pieces]), counts)
    seen: Any = (table[RequestSteps.TOKENS] > 0) & (table[RequestSteps.STEP] >= firsts)
    seen &= table[RequestSteps.ENDED_AT] > 0
    return seen


def _steps_between(steps: list[int], first: int, last: int) -> list[int]:
    return steps[bisect_left(steps, first) : bisect_right(steps, last)]


def _find_known_ends(
    table: Any, pieces: list[_RunSegment], seen: Any, requests: Sequence[OpenRequest]
) -> list[bool]:
    """Whether the last step that is known to have delivered something to a request is the last one that did."""
    known = [False] * len(requests)
    some = np.logical_or.reduceat(seen, [piece.at for piece in pieces]).tolist()
    for piece, is_some in zip(pieces, some):
        request = requests[piece.owner]
        if is_some and not request.steps_lost:
            known[piece.owner] = True
        elif is_some:
            # A later run of the same engine has the last word.
            steps = table[RequestSteps.STEP, piece.at : piece.end][seen[piece.at : piece.end]]
            known[piece.owner] = request.is_last(piece.log, int(steps[-1]))
    return known


def _build_limits(
    requests: Sequence[OpenRequest], records: Sequence[RequestRecord], first_at: Sequence[int]
) -> Any:
    """Lines: when each request arrived, ended, had its first token; before when its steps were begun, by when they were done.

    Nobody is given a token that is not known yet, so where a success ended before its last step was told to be done, that
    was told late.
    """
    limits = []
    for request, record, first in zip(requests, records, first_at):
        ended, until = record.ended_at, request.concluded_at
        begun, done = (ended, until) if record.outcome == events.OK else (_NEVER, min(ended, until))
        limits.append((record.arrived_at, ended, first, begun, done))
    return np.array(limits).T


def _clip_to_requests(table: Any, owner: Any, seen: Any, limits: Any) -> tuple[Any, Any]:
    """The steps of which the reader could have had something, with what of them lies inside the request.

    A step that was scheduled before the first token (two are in flight) is this request's from there on.
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
    # Of several engines, in the order in which they were done.
    if (same & (ended_at[1:] < ended_at[:-1])).any():
        table = table[:, np.lexsort((ended_at, owner))]
        started_at, ended_at = table[RequestSteps.STARTED_AT], table[RequestSteps.ENDED_AT]
    is_before = ended_at <= first
    np.maximum(started_at, first, out=started_at, where=~is_before)
    # Where the first step is not known, the first token is: those before it are no decode steps.
    dropped = is_before[1:] & same
    if not dropped.any():
        return table, owner
    kept = np.append(~dropped, True)
    return table.compress(kept, axis=1), owner[kept]


def _repeat_per_step(lines: Any, owner: Any) -> Any:
    """A number of each request for every of its steps. `owner` is in order."""
    bounds = np.searchsorted(owner, np.arange(lines.shape[1] + 1))
    return np.repeat(lines, np.diff(bounds), axis=1)
