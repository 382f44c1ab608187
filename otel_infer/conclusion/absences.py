"""When the engine was done with a request that then asked it again: an agent's, say, which generates more than once. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from otel_infer.conclusion.request import Request
from otel_infer.records import Absence, RequestRecord


def adopt(record: RequestRecord, request: Request) -> None:
    """Writes them into the record, and how many sequences there were at once; before which rows they lie, into its steps."""
    ends = sorted([fact.at for fact in request.finished])
    asked, at_once = request.asked[0][1], [request.asked[0][1]]
    apart: list[int] = []
    for again, sequences in request.asked[1:]:
        over = bisect_right(ends, again)
        absence = _before(again, ends[over - 1], record, request) if over >= asked else None
        asked += sequences
        if absence is None:
            at_once[-1] += sequences
            continue
        at_once.append(sequences)
        record.absences += (absence,)
        row = _row(record, again)
        if record.steps is not None and 0 < row < len(record.steps):
            apart.append(row)
    record.at_once = max(at_once)
    if record.steps is not None:
        record.steps.apart = tuple(apart)


def _before(again: int, finished: int, record: RequestRecord, request: Request) -> Absence | None:
    """None where a step that had begun by then brought it something all the same."""
    rows, row = record.steps, _row(record, again)
    if again >= record.ended_at or (rows is not None and row < len(rows) and rows.started_at[row] < again):
        return None
    since = int(rows.ended_at[row - 1]) if rows is not None and row else finished
    began = sorted([chunk.at for chunks in request.chunks.values() for chunk in chunks.values()])
    at = bisect_left(began, again)
    return Absence(since, again, began[at] if at < len(began) else 0) if since < again else None


def _row(record: RequestRecord, at: int) -> int:
    """Its first step that was done after this instant."""
    return int(record.steps.ended_at.searchsorted(at, "right")) if record.steps is not None else 0
