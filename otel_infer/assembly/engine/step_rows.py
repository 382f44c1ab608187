"""The decode steps of requests as columns, and what they come to: counted for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class RequestSteps:
    """The steps that delivered tokens to one request, in order. `table`: numpy int64, one line per column (6, steps).

    `started_at`, `ended_at`: the step scheduled, its tokens known. `tokens`: delivered to this request.
    `others_prefill_tokens`: prompt tokens of other requests in the same step. `device`: how long a device was at it, ns, 0 = not
    timed; None where none of them was. `apart`: rows, none of them the first, between which and the row before the engine was done
    with the request (`Absence`): that is no gap between tokens.
    """

    __slots__ = ("_count", "device", "gap_rows", "table")
    STEP, STARTED_AT, ENDED_AT, TOKENS, BATCH_SIZE, OTHERS_PREFILL_TOKENS = range(6)

    def __init__(self, table: Any, device: Any = None, apart: tuple[int, ...] = ()) -> None:
        self.table, self.device, self.gap_rows = table, device, apart
        self._count: int = table.shape[1]

    step = property(lambda self: self.table[0])
    started_at = property(lambda self: self.table[1])
    ended_at = property(lambda self: self.table[2])
    tokens = property(lambda self: self.table[3])
    batch_size = property(lambda self: self.table[4])
    others_prefill_tokens = property(lambda self: self.table[5])

    def __len__(self) -> int:
        return self._count

    def select_rows(self, selection: Any) -> RequestSteps:
        """The rows of a slice (as a view), a mask or an index array; what lay between them is not known of these."""
        return RequestSteps(self.table[:, selection], None if self.device is None else self.device[selection])

    def copy(self) -> RequestSteps:
        """With a table of its own."""
        return RequestSteps(self.table.copy(), self.device, self.gap_rows)


class StepSummary(NamedTuple):
    """All decode steps of a request (the first row is the prefill's) and the gaps between tokens; lengths in ns.

    `slowest`: number of the first step of the greatest length. `gaps`: how many there are, holes left out.
    """

    steps: int
    total: int
    p50: float
    p95: float
    longest: int
    slowest_step: int
    batch_size_max: int
    gaps: int
    gaps_total: int
    gap_max: int


NO_STEPS = StepSummary(0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)
STEPS_PER_BATCH = 32768
"""Steps that are worked on at once: numpy's price per call is hardly felt, and more would only take more memory."""
_LENGTH_BITS = 44  # of a step: up to 4.8 hours


def compute_token_gaps(tables: Sequence[RequestSteps], with_holes: Sequence[bool]) -> tuple[Any, Any]:
    """The time between each two steps that delivered tokens, ns, and whose it is; a hole where steps were lost is none."""
    counts = np.array([rows.table.shape[1] for rows in tables])
    owner = np.repeat(np.arange(len(counts)), counts)
    ended = np.concatenate([rows.ended_at for rows in tables])
    counted = owner[1:] == owner[:-1]
    if any(with_holes):
        step = np.concatenate([rows.step for rows in tables])
        counted &= ~np.array(with_holes)[owner[1:]] | (step[1:] - step[:-1] == 1)
    if apart := _locate_gap_rows(tables, np.cumsum(counts) - counts):
        counted[np.array(apart) - 1] = False
    return (ended[1:] - ended[:-1])[counted], owner[1:][counted]


def _locate_gap_rows(tables: Sequence[RequestSteps], begins: Any) -> list[int]:
    """Those rows in the table of all."""
    return [int(begin) + row for rows, begin in zip(tables, begins) for row in rows.gap_rows]


def diff_from_previous(column: Any) -> Any:
    """How much more each number is than the one before it; the first, than 0."""
    differences = column.copy()
    differences[1:] -= column[:-1]
    return differences


def summarize_steps(tables: Sequence[RequestSteps | None], with_holes: Sequence[bool]) -> list[StepSummary]:
    """A summary of each; numpy's price per call is paid once for all."""
    some = [i for i, rows in enumerate(tables) if rows is not None and len(rows) > 1]
    summaries = [NO_STEPS] * len(tables)
    if some:
        rows = [tables[i] for i in some]
        found = _summarize_tables(rows, np.array([with_holes[i] for i in some]))  # type: ignore[arg-type]
        for i, summary in zip(some, found):
            summaries[i] = summary
    return summaries


def _summarize_tables(tables: list[RequestSteps], with_holes: Any) -> list[StepSummary]:
    """Of tables with two rows or more each. The first row of each is no decode step: its columns are emptied."""
    counts = np.array([rows.table.shape[1] for rows in tables])
    begins = np.cumsum(counts) - counts
    step, started, ended, _, size, _ = np.concatenate([rows.table for rows in tables], axis=1)
    lengths = ended - started
    gaps = diff_from_previous(ended)
    if with_holes.any():
        gaps[np.repeat(with_holes, counts) & (diff_from_previous(step) != 1)] = -1
    if apart := _locate_gap_rows(tables, begins):
        gaps[apart] = -1
    lengths[begins] = size[begins] = 0
    gaps[begins] = -1
    longest = np.maximum.reduceat(lengths, begins)
    is_longest = lengths == np.repeat(longest, counts)
    is_longest[begins] = False
    hits = np.flatnonzero(is_longest)
    slowest = step[hits[np.searchsorted(hits, begins)]]
    p50, p95 = _compute_percentiles(lengths, begins, counts, (50, 95))
    seen = np.add.reduceat(gaps >= 0, begins, dtype=np.int64)
    np.maximum(gaps, 0, out=gaps)
    columns = (
        counts - 1, np.add.reduceat(lengths, begins), p50, p95, longest, slowest,
        np.maximum.reduceat(size, begins), seen, np.add.reduceat(gaps, begins), np.maximum.reduceat(gaps, begins),
    )  # fmt: skip
    return list(map(StepSummary, *(column.tolist() for column in columns)))


def _compute_percentiles(lengths: Any, begins: Any, counts: Any, percents: tuple[int, ...]) -> list[Any]:
    """Of each table's lengths but the first, which is 0; between neighbours in proportion, as `numpy.percentile` has it."""
    owner = np.repeat(np.arange(len(counts)) << _LENGTH_BITS, counts)
    ordered = np.sort(owner | np.minimum(lengths, (1 << _LENGTH_BITS) - 1))  # one sort for all
    found = []
    for percent in percents:
        below, rest = np.divmod(percent * (counts - 2), 100)
        at = begins + 1 + below
        low, high = ordered[at], ordered[np.minimum(at + 1, begins + counts - 1)]
        found.append((low & (1 << _LENGTH_BITS) - 1) + (high - low) * rest / 100)
    return found
