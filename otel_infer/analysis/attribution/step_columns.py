"""Returns the decode steps of many requests as columns, and the pauses and delays in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.step_rows import diff_from_previous
from otel_infer.assembly.engine.thread_delays import KnownDelays
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import RequestRecord

_UNKNOWN_COST = StepCostModel(float(1 << 60), 0.0, 0.0, 0)
"""In place of an unknown cost model: all time of a step is the request's own."""


def select_attributable_pauses(record: RequestRecord) -> Sequence[Pause]:
    """Returns the pauses that can be placed in steps.

    The amount of throttling is known roughly, but not its instants. Where thread delays of the engine's
    thread are recorded, they are more exact for its steps, so throttling is left out.
    """
    if record.thread_delays is None:
        return record.pauses
    return [pause for pause in record.pauses if pause.cause != semconv.CAUSE_THROTTLED]


def inactive_intervals(record: RequestRecord) -> list[tuple[Any, ...]]:
    """Returns the pauses and generation gaps of a request as (begin, end, …). They may overlap."""
    return (
        [*select_attributable_pauses(record), *record.generation_gaps]
        if record.pauses or record.generation_gaps
        else []
    )


class _DecodeSteps:
    """The steps of several requests as columns, request after request.

    `begins`: the first row of each request. It is the request's prefill and has length 0 here. `since`: the
    end of the previous step. `first_step_started_at`: a request that was preempted before this instant had no
    token then.
    """

    def __init__(self, records: list[RequestRecord]) -> None:
        tables = [record.steps.table for record in records if record.steps is not None]
        self.counts = np.array([table.shape[1] for table in tables])
        self.begins = np.cumsum(self.counts) - self.counts
        self.step, started, self.until, self.tokens, self.size, self.prefill = np.concatenate(tables, axis=1)
        self.first_step_started_at = started[self.begins]
        self.since = self.until.copy()
        self.since[1:] = self.until[:-1]
        self.since[self.begins] = self.until[self.begins]
        self.began = np.clip(started, self.since, self.until)
        self.prefill = np.maximum(self.prefill, 0)
        self.prefill[self.begins] = 0
        self.own_prefill = np.zeros_like(self.prefill)
        self.is_consecutive = diff_from_previous(self.step) == 1
        self.is_consecutive[self.begins] = True
        self._firsts = self.begins.tolist()
        self._ends = (self.begins + self.counts).tolist()
        for i, record in enumerate(records):
            if record.step_stride > 1:
                own_rows = self.decode_slice(i)
                self.is_consecutive[own_rows] = (
                    self.step[own_rows] - self.step[own_rows.start - 1 : own_rows.stop - 1]
                    == record.step_stride
                )
            if record.is_multi_engine:  # step numbers are counted per engine
                self.is_consecutive[self.decode_slice(i)] = True
            elif record.later_prefill_tokens:
                for step, tokens in record.later_prefill_tokens.items():
                    self.own_prefill[self.decode_slice(i)][self.step[self.decode_slice(i)] == step] = tokens

    def repeat_per_step(self, lines: Any) -> Any:
        """Repeats each request's numbers (one line per quantity) for each of its steps.

        Where all requests have the same numbers, one number per line is enough and is returned.
        """
        if (lines == lines[:, :1]).all():
            return lines[:, 0]
        return np.repeat(lines, self.counts, axis=1)

    def decode_slice(self, i: int) -> slice:
        """Returns the rows of the decode steps of request `i`."""
        return slice(self._firsts[i] + 1, self._ends[i])


def _subtract_pauses(records: list[RequestRecord], steps: _DecodeSteps, ran: Any, waited: Any) -> None:
    """Subtracts pauses and generation gaps from the run and wait times of the steps."""
    for i, record in enumerate(records):
        pauses = inactive_intervals(record)
        if not pauses:
            continue
        own_rows = steps.decode_slice(i)
        instants = np.stack((steps.since[own_rows], steps.began[own_rows], steps.until[own_rows]))
        since, began, until = _paused_time_before(pauses, instants)
        waited[own_rows] -= began - since
        ran[own_rows] -= until - began


def _paused_time_before(pauses: list[tuple[Any, ...]], instants: Any) -> Any:
    """Returns the ns of pauses before each instant. Overlapping pauses count once."""
    begins, ends, covered_until = [], [], 0
    for started, end, *_ in sorted(pauses, key=itemgetter(0)):
        if max(started, covered_until) < end:
            begins.append(max(started, covered_until))
            ends.append(end)
            covered_until = end
    starts, stops = np.array([begins, ends], np.int64)
    total_before = np.append(0, np.cumsum(stops - starts))
    index = np.searchsorted(starts, instants, "right")
    remaining = np.append(0, stops)[index] - instants
    return total_before[index] - np.maximum(remaining, 0) * (index > 0)


def _requests_with_delays(
    records: list[RequestRecord], steps: _DecodeSteps
) -> Iterator[tuple[int, KnownDelays]]:
    """Yields the index and the thread delays of each request whose steps overlap a delay."""
    begins, ends = steps.until[steps.begins], steps.until[steps.begins + steps.counts - 1]
    for delays in {record.thread_delays for record in records if record.thread_delays is not None}:
        for i in np.flatnonzero(delays.has_delays(begins, ends)).tolist():
            if records[i].thread_delays is delays:
                yield i, delays
