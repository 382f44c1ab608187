"""From what a tape tells to what a report shows. Pure; bounded, however long the tape; the same for the same tape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.rules import Diagnosis, diagnose
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import Interferer, RequestRecord
from otel_infer.config.slo import Objectives
from otel_infer.export.sampling.tail_sampler import find_missed_objectives
from otel_infer.ringbuffer import events

MAX_REQUESTS = 200
"""Requests shown one by one."""
MAX_INTERFERERS = 50
MAX_PAUSES = 100
"""Pauses drawn over the whole tape."""
BIN_COUNT = 200
"""Intervals that the tape is divided into."""
_INTERFERER_SLOTS = (
    MAX_REQUESTS // 5
)  # kept for those who held up others, since it is them that victims point to


class RecordingContents(NamedTuple):
    """Everything on a tape. `records`: those that were to reach an engine. `unfinished`: when the others of these arrived.

    `elsewhere`: how many requests reached no engine, as health checks do. `promised`: what the server was to meet. `since`: from
    which instant on everything is told; before it, only what the rest was waiting for. `running`: since when those run that have
    not ended.
    """

    records: list[RequestRecord]
    steps: list[StepRecord]
    pauses: list[Pause]
    unfinished_arrivals: list[int]
    non_engine_requests: int
    objectives: Objectives = Objectives()
    complete_since: int = 0
    running_since: Sequence[int] = ()

    def time_range(self) -> tuple[int, int]:
        """The first and the last instant of which everything is told; monotonic ns."""
        spans = [(record.arrived_at, record.ended_at) for record in self.records]
        spans += [(stage.started_at, stage.ended_at) for record in self.records for stage in record.stages]
        spans += [(step.started_at, step.ended_at) for step in self.steps]
        spans += [(pause.started_at, pause.ended_at) for pause in self.pauses]
        instants = [*self.unfinished_arrivals, *chain.from_iterable(spans)]
        return (max(min(instants), self.complete_since), max(instants)) if instants else (0, 0)


class Percentiles(NamedTuple):
    """How long something took; ns. `share`: of all requests' time; None where that says nothing."""

    name: str
    values: int
    p50: float
    p95: float
    p99: float
    longest: float
    share: float | None


class CauseShare(NamedTuple):
    """Share of the time of the slowest tenth, and of everybody's."""

    cause: str
    slowest_share: float
    overall_share: float


class InterfererRow(NamedTuple):
    """Who held up whom; ns. `record` is None for one that is not on the tape."""

    trace_id: bytes
    span_id: bytes
    record: RequestRecord | None
    affected_requests: int
    total_delay_ns: int
    worst_affected: RequestRecord
    worst_delay_ns: int


class TimelineBin(NamedTuple):
    """An interval of the tape: most requests running and most in the queue at once, each at an instant of its own; longest and
    usual step (ns; 0 = none ended here), prompt tokens."""

    running: int
    queued: int
    longest_step: int
    median_step: float
    prompt_tokens: int


class ReportView(NamedTuple):
    """What a report shows. `shown`: requests one by one, those of `missed` first, then the slowest.

    `missed`: by span id the objectives that a request did not meet. `wall_offset`: unix ns − monotonic ns.
    """

    recording: RecordingContents
    began: int
    ended: int
    wall_offset: int
    diagnosis: Diagnosis
    latencies: list[Percentiles]
    stages: list[Percentiles]
    causes: list[CauseShare]
    bins: list[TimelineBin]
    pauses: list[Pause]
    shown: list[RequestRecord]
    interferers: list[InterfererRow]
    missed_objectives: dict[bytes, tuple[str, ...]]

    def count_outcome(self, outcome: int) -> int:
        """How many requests ended so."""
        return sum(record.outcome == outcome for record in self.recording.records)


def build_view(told: RecordingContents) -> ReportView:
    """Everything that is to be shown."""
    began, ended = told.time_range()
    diagnosis = diagnose(told.records, told.complete_since, told.running_since)
    held_up = _rank_interferers(told.records)
    missed = {r.span_id: names for r in told.records if (names := find_missed_objectives(r, told.objectives))}
    longest = sorted(told.pauses, key=lambda pause: (pause.started_at - pause.ended_at, pause))[:MAX_PAUSES]
    return ReportView(
        told, began, ended, told.records[0].wall_offset if told.records else 0, diagnosis,
        _latency_percentiles(told.records), _stage_percentiles(told.records), _cause_shares(diagnosis, told.records),
        _build_bins(told, began, ended), sorted(longest), _select_requests(told.records, held_up, missed),
        held_up[:MAX_INTERFERERS], missed,
    )  # fmt: skip


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_percentiles(name: str, lengths: Any, share: float | None = None) -> Percentiles:
    """Percentiles of lengths, of which there is at least one."""
    column = np.asarray(lengths)
    p50, p95, p99 = np.percentile(column, (50, 95, 99)).tolist()
    return Percentiles(name, len(column), p50, p95, p99, float(column.max()), share)


def _latency_percentiles(records: Sequence[RequestRecord]) -> list[Percentiles]:
    """What the reader felt; of successful requests."""
    good = [record for record in records if record.outcome == events.OK]
    gaps = np.concatenate([[], *(np.asarray(record.gaps_ns()) for record in good)])
    rows = (
        ("time to first token", [record.ttft_ns for record in good if record.ttft_ns]),
        ("between tokens", gaps),
        ("end to end", [record.duration_ns for record in good]),
    )
    return [compute_percentiles(name, lengths) for name, lengths in rows if len(lengths)]


def _stage_percentiles(records: Sequence[RequestRecord]) -> list[Percentiles]:
    """In the order in which they happen; an application's own after ours, the longest together first."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for stage in record.stages:
            lengths[stage.name].append(stage.ended_at - stage.started_at)
    total = sum(record.duration_ns for record in records) or 1
    own = sorted(lengths.keys() - set(semconv.STAGES), key=lambda name: (-sum(lengths[name]), name))
    names = [name for name in semconv.STAGES if name in lengths] + own[:MAX_INTERFERERS]
    return [compute_percentiles(name, lengths[name], sum(lengths[name]) / total) for name in names]


def _cause_shares(diagnosis: Diagnosis, records: Sequence[RequestRecord]) -> list[CauseShare]:
    everybody: dict[str, int] = defaultdict(int)
    for record in records:
        for cause, length in record.breakdown.causes.items() if record.breakdown is not None else ():
            everybody[cause] += length
    whole = sum(everybody.values()) or 1
    rows = [
        CauseShare(cause, diagnosis.causes.get(cause, 0.0), length / whole)
        for cause, length in everybody.items()
    ]
    return sorted(rows, key=lambda row: (-row.slowest_share, -row.overall_share, row.cause))


# ── who ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rank_interferers(records: Sequence[RequestRecord]) -> list[InterfererRow]:
    """Offenders, by the time that those who name them first of all lost."""
    victims: dict[tuple[bytes, bytes], list[tuple[Interferer, RequestRecord]]] = defaultdict(list)
    for record in records:
        if record.breakdown is not None and record.breakdown.interferer is not None:
            offender = record.breakdown.interferer
            victims[offender.trace_id, offender.span_id].append((offender, record))
    known = {record.span_id: record for record in records}
    rows = []
    for (trace_id, span_id), held in victims.items():
        worst, victim = max(held, key=lambda one: (one[0].length, one[1].span_id))
        total = sum(offender.length for offender, _ in held)
        rows.append(
            InterfererRow(trace_id, span_id, known.get(span_id), len(held), total, victim, worst.length)
        )
    return sorted(rows, key=lambda row: (-row.total_delay_ns, row.span_id))


def _select_requests(
    records: Sequence[RequestRecord], held_up: Sequence[InterfererRow], missed: Container[bytes]
) -> list[RequestRecord]:
    """The slowest by end to end, first token and gap in turn, and those who held them up; what missed objectives first."""
    by_length = _rank_requests(records, lambda record: record.duration_ns)
    offenders = [row.record for row in held_up if row.record is not None]
    ranks = (
        by_length,
        _rank_requests(records, lambda record: record.ttft_ns),
        _rank_requests(records, lambda record: record.summary.gap_max),
    )
    slow = [record for record in by_length if record.span_id in missed]
    slow += [record for places in zip_longest(*ranks) for record in places if record is not None]
    chosen: dict[int, RequestRecord] = {}
    places = MAX_REQUESTS - min(len(offenders), _INTERFERER_SLOTS)
    for many, candidates in ((places, slow), (MAX_REQUESTS, offenders), (MAX_REQUESTS, slow)):
        for record in candidates:
            if len(chosen) < many:
                chosen.setdefault(id(record), record)
    longest = _rank_requests(chosen.values(), lambda record: record.duration_ns)
    return sorted(longest, key=lambda record: record.span_id not in missed)


def _rank_requests(records: Iterable[RequestRecord], key: Any) -> list[RequestRecord]:
    return sorted(records, key=lambda record: (-key(record), record.arrived_at, record.span_id))


# ── over the tape ────────────────────────────────────────────────────────────────────────────────────────────────


def queue_intervals(records: Iterable[RequestRecord]) -> list[tuple[int, int]]:
    """When each was in the queue."""
    stages = (record.find_stage(semconv.SPAN_QUEUE) for record in records)
    return [(stage.started_at, stage.ended_at) for stage in stages if stage is not None]


def _running_intervals(record: RequestRecord) -> list[tuple[int, int]]:
    """When it was there and not in the queue."""
    queue = record.find_stage(semconv.SPAN_QUEUE)
    if queue is None:
        return [(record.arrived_at, record.ended_at)]
    return [(record.arrived_at, queue.started_at), (queue.ended_at, record.ended_at)]


def count_concurrent(intervals: Iterable[tuple[int, int]]) -> tuple[Any, Any]:
    """How many of these intervals hold from each instant on at which that changes, up to the next."""
    column = np.array([*intervals], np.int64).reshape(-1, 2)
    instants = np.concatenate([column[:, 0], column.max(axis=1)])
    change = np.repeat([1, -1], len(column))
    at, which = np.unique(instants, return_inverse=True)
    return at, np.cumsum(np.bincount(which, weights=change, minlength=len(at))).astype(np.int64)


def _build_bins(told: RecordingContents, began: int, ended: int) -> list[TimelineBin]:
    width = max(ended - began, 1)
    in_flight = [run for record in told.records for run in _running_intervals(record)]
    in_flight += [(arrived_at, ended + 1) for arrived_at in told.unfinished_arrivals]
    running = _bin_maxima(count_concurrent(in_flight), began, width)
    queued = _bin_maxima(count_concurrent(queue_intervals(told.records)), began, width)
    steps = np.array(
        [(step.ended_at, step.ended_at - step.started_at, step.prefill_tokens) for step in told.steps],
        np.int64,
    ).reshape(-1, 3)
    which = np.minimum((steps[:, 0] - began) * BIN_COUNT // width, BIN_COUNT - 1)
    bins = []
    for number in range(BIN_COUNT):
        _, lengths, prompts = steps[which == number].T
        longest, usual = (int(lengths.max()), float(np.median(lengths))) if len(lengths) else (0, 0.0)
        bins.append(
            TimelineBin(int(running[number]), int(queued[number]), longest, usual, int(prompts.sum()))
        )
    return bins


def _bin_maxima(changes: tuple[Any, Any], began: int, width: int) -> Any:
    """The highest level in each bin: what it begins with, or what it rises to."""
    at, level = changes
    edges = began + np.arange(BIN_COUNT, dtype=np.int64) * width // BIN_COUNT
    before = np.searchsorted(at, edges, side="right") - 1
    most = np.where(before >= 0, level[before] if len(level) else 0, 0)
    inside = at >= began
    which = np.minimum((at[inside] - began) * BIN_COUNT // width, BIN_COUNT - 1)
    np.maximum.at(most, which, level[inside])
    return most
