"""The decode steps of requests as columns, and their summaries, computed for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class RequestSteps:
    """The steps that delivered tokens to one request, in order.

    `table`: numpy int64, one line per column (6, steps).

    `started_at`, `ended_at`: when the step was scheduled, and when its tokens were known. `tokens`: delivered
    to this request. `others_prefill_tokens`: prompt tokens of other requests in the same step. `device`: how
    long a device ran each step, ns, 0 = not timed; None where no step was timed. `gap_rows`: rows, never the
    first, after a `GenerationGap`: the engine had finished the request before this row, so the time since the
    row before is no gap between tokens.
    """

    __slots__ = ("_count", "device", "gap_rows", "table")
    STEP, STARTED_AT, ENDED_AT, TOKENS, BATCH_SIZE, OTHERS_PREFILL_TOKENS = range(6)

    def __init__(self, table: Any, device: Any = None, gap_rows: tuple[int, ...] = ()) -> None:
        self.table, self.device, self.gap_rows = table, device, gap_rows
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
        """Returns the rows of a slice (as a view), a mask or an index array, without `gap_rows`."""
        return RequestSteps(self.table[:, selection], None if self.device is None else self.device[selection])

    def copy(self) -> RequestSteps:
        """Returns these steps with a copy of the table."""
        return RequestSteps(self.table.copy(), self.device, self.gap_rows)


class StepSummary(NamedTuple):
    """All decode steps of a request, without the prefill row, and the gaps between tokens; lengths in ns.

    `slowest_step`: number of the first step of the greatest length. `gaps`: their count, without lost steps.
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
"""Steps processed at once: numpy's cost per call is amortised, and more steps only take more memory."""
_LENGTH_BITS = 44  # of a step: up to 4.8 hours


def compute_token_gaps(tables: Sequence[RequestSteps], with_holes: Sequence[bool]) -> tuple[Any, Any]:
    """Returns the gaps between tokens, ns, and the index of the table of each gap.

    A gap is the time between two steps that delivered tokens. `with_holes`: tables in which steps were lost;
    there, the time between two steps that are not consecutive is no gap.
    """
    counts = np.array([rows.table.shape[1] for rows in tables])
    owner = np.repeat(np.arange(len(counts)), counts)
    ended = np.concatenate([rows.ended_at for rows in tables])
    counted = owner[1:] == owner[:-1]
    if any(with_holes):
        step = np.concatenate([rows.step for rows in tables])
        counted &= ~np.array(with_holes)[owner[1:]] | (step[1:] - step[:-1] == 1)
    if gap_rows := _locate_gap_rows(tables, np.cumsum(counts) - counts):
        counted[np.array(gap_rows) - 1] = False
    return (ended[1:] - ended[:-1])[counted], owner[1:][counted]


def _locate_gap_rows(tables: Sequence[RequestSteps], begins: Any) -> list[int]:
    """Returns the `gap_rows` of all tables, as rows of the concatenated table."""
    return [int(begin) + row for rows, begin in zip(tables, begins) for row in rows.gap_rows]


def diff_from_previous(column: Any) -> Any:
    """Returns each number's difference from the one before it; the first number stays."""
    differences = column.copy()
    differences[1:] -= column[:-1]
    return differences


def summarize_steps(tables: Sequence[RequestSteps | None], with_holes: Sequence[bool]) -> list[StepSummary]:
    """Returns a summary of each table; all are computed together, which amortises numpy's cost per call."""
    chosen = [i for i, rows in enumerate(tables) if rows is not None and len(rows) > 1]
    summaries = [NO_STEPS] * len(tables)
    if chosen:
        rows = [tables[i] for i in chosen]
        results = _summarize_tables(rows, np.array([with_holes[i] for i in chosen]))  # type: ignore[arg-type]
        for i, summary in zip(chosen, results):
            summaries[i] = summary
    return summaries


def _summarize_tables(tables: list[RequestSteps], with_holes: Any) -> list[StepSummary]:
    """Returns the summaries of tables with at least two rows each.

    The first row of each table is no decode step, so its values are excluded.
    """
    counts = np.array([rows.table.shape[1] for rows in tables])
    begins = np.cumsum(counts) - counts
    step, started, ended, _, size, _ = np.concatenate([rows.table for rows in tables], axis=1)
    lengths = ended - started
    gaps = diff_from_previous(ended)
    if with_holes.any():
        gaps[np.repeat(with_holes, counts) & (diff_from_previous(step) != 1)] = -1
    if gap_rows := _locate_gap_rows(tables, begins):
        gaps[gap_rows] = -1
    lengths[begins] = size[begins] = 0
    gaps[begins] = -1
    longest = np.maximum.reduceat(lengths, begins)
    is_longest = lengths == np.repeat(longest, counts)
    is_longest[begins] = False
    hits = np.flatnonzero(is_longest)
    slowest = step[hits[np.searchsorted(hits, begins)]]
    p50, p95 = _compute_percentiles(lengths, begins, counts, (50, 95))
    gap_counts = np.add.reduceat(gaps >= 0, begins, dtype=np.int64)
    np.maximum(gaps, 0, out=gaps)
    columns = (
        counts - 1, np.add.reduceat(lengths, begins), p50, p95, longest, slowest,
        np.maximum.reduceat(size, begins), gap_counts, np.add.reduceat(gaps, begins),
        np.maximum.reduceat(gaps, begins),
    )  # fmt: skip
    return list(map(StepSummary, *(column.tolist() for column in columns)))


def _compute_percentiles(lengths: Any, begins: Any, counts: Any, percents: tuple[int, ...]) -> list[Any]:
    """Returns percentiles of each table's lengths without its first row, as `numpy.percentile` does."""
    owner = np.repeat(np.arange(len(counts)) << _LENGTH_BITS, counts)
    ordered = np.sort(owner | np.minimum(lengths, (1 << _LENGTH_BITS) - 1))  # one sort for all tables
    percentiles = []
    for percent in percents:
        below, rest = np.divmod(percent * (counts - 2), 100)
        at = begins + 1 + below
        low, high = ordered[at], ordered[np.minimum(at + 1, begins + counts - 1)]
        percentiles.append((low & (1 << _LENGTH_BITS) - 1) + (high - low) * rest / 100)
    return percentiles
