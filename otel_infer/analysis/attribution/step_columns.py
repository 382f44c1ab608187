"""The decode steps of many requests as columns, and what held them up from outside. Pure."""

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


def attributable_pauses(record: RequestRecord) -> Sequence[Pause]:
    """The pauses of which it is known which steps they held up.

    Of throttling it is known how much there was, roughly, and not when; where the kernel tells how long the engine's thread
    had no CPU, that is the better word for its steps.
    """
    if record.thread_delays is None:
        return record.pauses
    return [pause for pause in record.pauses if pause.cause != semconv.CAUSE_THROTTLED]


def inactive_intervals(record: RequestRecord) -> list[tuple[Any, ...]]:
    """When nothing was done for it, as far as that is known of single steps: begin and end of each, which may overlap."""
    return (
        [*attributable_pauses(record), *record.generation_gaps]
        if record.pauses or record.generation_gaps
        else []
    )


class _DecodeSteps:
    """The steps of all requests as columns. `begins`: where each request's are.

    The first one of each is its prompt's: here it takes no time. Who was put back before that was `asked` for had no token.
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
                mine = self.decode_slice(i)
                self.is_consecutive[mine] = (
                    self.step[mine] - self.step[mine.start - 1 : mine.stop - 1] == record.step_stride
                )
            if record.is_multi_engine:  # steps of several engines have numbers of their own
                self.is_consecutive[self.decode_slice(i)] = True
            elif record.later_prefill_tokens:
                for step, tokens in record.later_prefill_tokens.items():
                    self.own_prefill[self.decode_slice(i)][self.step[self.decode_slice(i)] == step] = tokens

    def repeat_per_step(self, lines: Any) -> Any:
        """A number of each request (a row of several lines) for each of its steps; one for all where they have the same."""
        if (lines == lines[:, :1]).all():
            return lines[:, 0]
        return np.repeat(lines, self.counts, axis=1)

    def decode_slice(self, i: int) -> slice:
        """Where the decode steps of this request are."""
        return slice(self._firsts[i] + 1, self._ends[i])


def _subtract_pauses(records: list[RequestRecord], steps: _DecodeSteps, ran: Any, waited: Any) -> None:
    """Takes what the process was held up out of the steps it happened in, and when the engine was done with it."""
    for i, record in enumerate(records):
        pauses = inactive_intervals(record)
        if not pauses:
            continue
        mine = steps.decode_slice(i)
        instants = np.stack((steps.since[mine], steps.began[mine], steps.until[mine]))
        since, began, until = _paused_time_before(pauses, instants)
        waited[mine] -= began - since
        ran[mine] -= until - began


def _paused_time_before(pauses: list[tuple[Any, ...]], instants: Any) -> Any:
    """How much of the time before each of these instants is in the pauses, of which each ns counts once; ns."""
    begins, ends, told = [], [], 0
    for started, end, *_ in sorted(pauses, key=itemgetter(0)):
        if max(started, told) < end:
            begins.append(max(started, told))
            ends.append(end)
            told = end
    starts, stops = np.array([begins, ends], np.int64)
    whole = np.append(0, np.cumsum(stops - starts))
    begun = np.searchsorted(starts, instants, "right")
    left = np.append(0, stops)[begun] - instants
    return whole[begun] - np.maximum(left, 0) * (begun > 0)


def _requests_with_delays(
    records: list[RequestRecord], steps: _DecodeSteps
) -> Iterator[tuple[int, KnownDelays]]:
    """The requests of whose steps the kernel knows something, and who says it."""
    begins, ends = steps.until[steps.begins], steps.until[steps.begins + steps.counts - 1]
    for strain in {record.thread_delays for record in records if record.thread_delays is not None}:
        for i in np.flatnonzero(strain.has_delays(begins, ends)).tolist():
            if records[i].thread_delays is strain:
                yield i, strain
