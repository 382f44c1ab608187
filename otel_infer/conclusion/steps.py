"""Which steps requests that are over took part in, for many requests at once. Pure.

Every line of the tables here belongs to one step of one request; columns of whole groups of requests are worked on
together, since numpy's price per call would otherwise be most of what a request costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import facts
from otel_infer.conclusion.request import Request
from otel_infer.steplog import Run
from otel_infer.steprows import StepRows

_EMPTY = np.empty((6, 0), np.int64)


class Part(NamedTuple):
    """Steps that delivered something to a request. `forgotten`: how many more there were, that nobody remembers.

    `is_last_known`: whether the last of them is the last there was.
    """

    rows: StepRows
    forgotten: int
    is_last_known: bool


class _Piece(NamedTuple):
    """A run of one request whose steps are all remembered, or missing. `at`: where it begins in the table of all."""

    owner: int
    run: Run
    at: int

    @property
    def end(self) -> int:
        return self.at + self.run.last - self.run.first + 1


def steps_of(requests: Sequence[Request], first_at: Sequence[int]) -> list[Part]:
    """The part of each request; `first_at`: when it had its first token, as far as is known, or else 0."""
    pieces, forgotten = _pieces(requests)
    if not pieces:
        return [Part(StepRows(_EMPTY), lost, False) for lost in forgotten]
    table = np.concatenate(
        [
            columns
            for piece in pieces
            for columns in piece.run.log.table.columns(piece.run.first, piece.run.last)
        ],
        axis=1,
    )
    seen = _adopted(table, pieces, requests)
    known = [False] * len(requests)
    for piece in pieces:
        request, steps = requests[piece.owner], table[StepRows.STEP, piece.at : piece.end]
        delivered = np.flatnonzero(seen[piece.at : piece.end]) if request.steps_lost else None
        if delivered is None:
            known[piece.owner] = known[piece.owner] or bool(seen[piece.at : piece.end].any())
        elif len(delivered):
            # A later run of the same engine has the last word.
            known[piece.owner] = request.is_last(piece.run.log, int(steps[delivered[-1]]))
    counts = [piece.end - piece.at for piece in pieces]
    owner = np.repeat([piece.owner for piece in pieces], counts)
    table, owner = _inside(table, owner, seen, requests, np.array(first_at))
    ends = np.cumsum(np.bincount(owner, minlength=len(requests))).tolist()
    begins = [0, *ends]
    return [
        Part(StepRows(table[:, begin:end]), lost, is_known)
        for begin, end, lost, is_known in zip(begins, ends, forgotten, known)
    ]


def _pieces(requests: Sequence[Request]) -> tuple[list[_Piece], list[int]]:
    """The runs of all requests, request by request, and how many steps of each are no longer remembered."""
    pieces: list[_Piece] = []
    forgotten = [0] * len(requests)
    at = 0
    for owner, request in enumerate(requests):
        for run in request.runs:
            first = max(run.first, run.log.table.oldest)
            forgotten[owner] += min(first, run.last + 1) - run.first
            if first <= run.last:
                pieces.append(_Piece(owner, run._replace(first=first), at))
                at += run.last - first + 1
    return pieces, forgotten


def _adopted(table: Any, pieces: list[_Piece], requests: Sequence[Request]) -> Any:
    """Writes into the table what is each request's own; returns which rows delivered something to it."""
    counts = [piece.end - piece.at for piece in pieces]
    table[StepRows.TOKENS] = np.repeat([piece.run.sequences for piece in pieces], counts)
    more: dict[int, int] = {}
    own: dict[int, int] = {}
    for piece in pieces:
        request, log = requests[piece.owner], piece.run.log
        more.update(_placed(piece, request.deltas.get(log, {}).items()))
        chunks = request.chunks.get(log, {}).items()
        own.update(_placed(piece, [(step, -chunk.tokens) for step, chunk in chunks]))
    for line, changes in ((StepRows.TOKENS, more), (StepRows.OTHERS_PREFILL_TOKENS, own)):
        if changes:
            table[line, list(changes)] += np.array(list(changes.values()))
    # Where a step is missing, its place holds an older one.
    firsts = np.repeat([piece.run.first for piece in pieces], counts)
    seen: Any = (table[StepRows.TOKENS] > 0) & (table[StepRows.STEP] >= firsts)
    seen &= table[StepRows.ENDED_AT] > 0
    return seen


def _placed(piece: _Piece, changes: Any) -> list[tuple[int, int]]:
    """(column, number) of what changes in steps of this piece."""
    _, run, at = piece
    return [(at + step - run.first, number) for step, number in changes if run.first <= step <= run.last]


def _inside(table: Any, owner: Any, seen: Any, requests: Sequence[Request], first_at: Any) -> tuple[Any, Any]:
    """The steps of which the reader could have had something, with what of them lies inside the request.

    Nobody is given a token that is not known yet, so where a success ended before its last step was told to be done, that
    was told late. A step that was scheduled before the first token (two are in flight) is this request's from there on.
    """
    arrived, ended, until = (
        np.array([getattr(request, name) for request in requests])[owner]
        for name in ("arrived_at", "ended_at", "concluded_at")
    )
    well = np.array([request.outcome == facts.OK for request in requests])[owner]
    started_at, ended_at = table[StepRows.STARTED_AT], table[StepRows.ENDED_AT]
    inside = seen & np.where(well, started_at < ended, ended_at <= ended)
    inside &= (ended_at > arrived) & (ended_at <= until)
    if not inside.all():
        table, owner, arrived, ended = table[:, inside], owner[inside], arrived[inside], ended[inside]
        started_at, ended_at = table[StepRows.STARTED_AT], table[StepRows.ENDED_AT]
    np.minimum(ended_at, ended, out=ended_at)
    np.maximum(started_at, arrived, out=started_at)
    same = owner[1:] == owner[:-1]
    if (
        same & (ended_at[1:] < ended_at[:-1])
    ).any():  # of several engines, in the order in which they were done
        table = table[:, np.lexsort((ended_at, owner))]
        started_at, ended_at = table[StepRows.STARTED_AT], table[StepRows.ENDED_AT]
    first = first_at[owner]
    is_before = ended_at <= first
    np.maximum(started_at, first, out=started_at, where=~is_before)
    # Where the first step is not known, the first token is: those before it are no decode steps.
    kept = np.ones(len(owner), bool)
    kept[:-1] = ~(is_before[1:] & same)
    return (table, owner) if kept.all() else (table[:, kept], owner[kept])
