"""Builds the view of a report from the contents of a tape.

Pure and deterministic. The size of the view is bounded, independent of the length of the tape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.failed_waits import add_failed_waits
from otel_infer.analysis.diagnosis.rules import Diagnosis, diagnose_requests
from otel_infer.analysis.diagnosis.unfollowed import replace_by_unfollowed
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.missed_objectives import list_missed_objectives
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import Interferer, RequestRecord
from otel_infer.cli.latency import collect_latencies
from otel_infer.config.slo import Objectives
from otel_infer.ringbuffer.events import CpuSeen

MAX_REQUESTS = 200
"""Requests shown one by one."""
MAX_INTERFERERS = 50
MAX_PAUSES = 100
"""Pauses drawn on the timeline."""
BIN_COUNT = 200
"""Intervals of the timeline."""
_INTERFERER_SLOTS = MAX_REQUESTS // 5  # reserved for interferers, because the delayed requests link to them


class RecordingContents(NamedTuple):
    """The contents of a tape. `records`: finished requests to an engine.

    `unfinished_arrivals`: arrivals of the unfinished ones. `non_engine_requests`: number of other requests,
    e.g. health checks. `objectives`: those of the server. `complete_since`: from when on the tape has all
    events; earlier events only explain later ones. `running_since`: when each unfinished request was
    scheduled, or else arrived. `unfollowed`: which HTTP requests lack their model calls. Instants are monotonic ns.
    """

    records: list[RequestRecord]
    steps: list[StepRecord]
    pauses: list[Pause]
    unfinished_arrivals: list[int]
    non_engine_requests: int
    objectives: Objectives = Objectives()
    complete_since: int = 0
    running_since: Sequence[int] = ()
    cpu_usage: Sequence[CpuSeen] = ()
    abandoned_share: float = 0.0
    unfollowed: str = ""

    def time_range(self) -> tuple[int, int]:
        """Returns the first and last instant with complete data (monotonic ns); (0, 0) for an empty tape."""
        spans = [(record.arrived_at, record.ended_at) for record in self.records]
        spans += [(stage.started_at, stage.ended_at) for record in self.records for stage in record.stages]
        spans += [(step.started_at, step.ended_at) for step in self.steps]
        spans += [(pause.started_at, pause.ended_at) for pause in self.pauses]
        instants = [*self.unfinished_arrivals, *chain.from_iterable(spans)]
        return (max(min(instants), self.complete_since), max(instants)) if instants else (0, 0)


class Percentiles(NamedTuple):
    """Percentiles of lengths in ns. `share`: of all requests' time, 0 to 1; None if it does not apply."""

    name: str
    values: int
    p50: float
    p95: float
    p99: float
    longest: float
    share: float | None


class CauseShare(NamedTuple):
    """Share of a cause in the time of the slowest tenth, and of all requests; 0 to 1."""

    cause: str
    slowest_share: float
    overall_share: float


class InterfererRow(NamedTuple):
    """An interferer and the requests whose main interferer it is.

    Lengths in ns. `record`: None if it is not on the tape.
    """

    trace_id: bytes
    span_id: bytes
    record: RequestRecord | None
    affected_requests: int
    total_delay_ns: int
    worst_affected: RequestRecord
    worst_delay_ns: int


class TimelineBin(NamedTuple):
    """An interval of the timeline.

    `running`, `queued`: maximum of concurrent requests; the instants may differ. `longest_step`,
    `median_step`: ns; 0 = no step ended in the interval.
    """

    running: int
    queued: int
    longest_step: int
    median_step: float
    prompt_tokens: int


class ReportView(NamedTuple):
    """The data that a report shows.

    `shown`: the requests shown one by one, missed objectives first, then the slowest. `missed_objectives`: by
    span id, the objectives that a request missed. `wall_offset`: unix ns − monotonic ns.
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
        """Returns the number of requests with this outcome."""
        return sum(record.outcome == outcome for record in self.recording.records)


def build_view(recording: RecordingContents) -> ReportView:
    """Builds the view of a tape."""
    began, ended = recording.time_range()
    missed = list_missed_objectives(recording.records, recording.objectives)
    diagnosis = diagnose_requests(
        recording.records, recording.complete_since, recording.running_since, recording.cpu_usage,
        recording.abandoned_share, missed,
    )  # fmt: skip
    diagnosis = replace_by_unfollowed(add_failed_waits(diagnosis, recording.records), recording.unfollowed)
    interferers = _rank_interferers(recording.records)
    longest = sorted(recording.pauses, key=lambda pause: (pause.started_at - pause.ended_at, pause))[
        :MAX_PAUSES
    ]
    return ReportView(
        recording, began, ended, recording.records[0].wall_offset if recording.records else 0, diagnosis,
        _latency_percentiles(recording.records), _stage_percentiles(recording.records), _cause_shares(diagnosis, recording.records),
        _build_bins(recording, began, ended), sorted(longest), _select_requests(recording.records, interferers, missed),
        interferers[:MAX_INTERFERERS], missed,
    )  # fmt: skip


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_percentiles(name: str, lengths: Any, share: float | None = None) -> Percentiles:
    """Returns the percentiles of lengths, of which there must be at least one."""
    column = np.asarray(lengths)
    p50, p95, p99 = np.percentile(column, (50, 95, 99)).tolist()
    return Percentiles(name, len(column), p50, p95, p99, float(column.max()), share)


def _latency_percentiles(records: Sequence[RequestRecord]) -> list[Percentiles]:
    """Returns the client-side latencies of successful requests."""
    return [compute_percentiles(name, lengths) for name, lengths in collect_latencies(records)]


def _stage_percentiles(records: Sequence[RequestRecord]) -> list[Percentiles]:
    """Returns the stages in the order of a request, then the application's by descending total time."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for stage in record.stages:
            lengths[stage.name].append(stage.ended_at - stage.started_at)
    total = sum(record.duration_ns for record in records) or 1
    own = sorted(lengths.keys() - set(semconv.STAGES), key=lambda name: (-sum(lengths[name]), name))
    names = [name for name in semconv.STAGES if name in lengths] + own[:MAX_INTERFERERS]
    return [compute_percentiles(name, lengths[name], sum(lengths[name]) / total) for name in names]


def _cause_shares(diagnosis: Diagnosis, records: Sequence[RequestRecord]) -> list[CauseShare]:
    totals: dict[str, int] = defaultdict(int)
    for record in records:
        for cause, length in record.breakdown.causes.items() if record.breakdown is not None else ():
            totals[cause] += length
    whole = sum(totals.values()) or 1
    rows = [
        CauseShare(cause, diagnosis.causes.get(cause, 0.0), length / whole)
        for cause, length in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.slowest_share, -row.overall_share, row.cause))


# ── interferers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _rank_interferers(records: Sequence[RequestRecord]) -> list[InterfererRow]:
    """Returns the interferers by the total delay of the requests that name them as main interferer."""
    delayed: dict[tuple[bytes, bytes], list[tuple[Interferer, RequestRecord]]] = defaultdict(list)
    for record in records:
        if record.breakdown is not None and record.breakdown.interferer is not None:
            interferer = record.breakdown.interferer
            delayed[interferer.trace_id, interferer.span_id].append((interferer, record))
    known = {record.span_id: record for record in records}
    rows = []
    for (trace_id, span_id), pairs in delayed.items():
        worst, delayed_record = max(pairs, key=lambda pair: (pair[0].length, pair[1].span_id))
        total = sum(interferer.length for interferer, _ in pairs)
        rows.append(
            InterfererRow(
                trace_id, span_id, known.get(span_id), len(pairs), total, delayed_record, worst.length
            )
        )
    return sorted(rows, key=lambda row: (-row.total_delay_ns, row.span_id))


def _select_requests(
    records: Sequence[RequestRecord], interferers: Sequence[InterfererRow], missed: Container[bytes]
) -> list[RequestRecord]:
    """Selects at most `MAX_REQUESTS` requests: missed objectives, the slowest, and their interferers.

    The slowest are taken in turn by end-to-end latency, first token and longest gap.
    """
    by_length = _rank_requests(records, lambda record: record.duration_ns)
    interferer_records = [row.record for row in interferers if row.record is not None]
    ranks = (
        by_length,
        _rank_requests(records, lambda record: record.ttft_ns),
        _rank_requests(records, lambda record: record.summary.gap_max),
    )
    slow = [record for record in by_length if record.span_id in missed]
    slow += [record for places in zip_longest(*ranks) for record in places if record is not None]
    chosen: dict[int, RequestRecord] = {}
    places = MAX_REQUESTS - min(len(interferer_records), _INTERFERER_SLOTS)
    for limit, candidates in ((places, slow), (MAX_REQUESTS, interferer_records), (MAX_REQUESTS, slow)):
        for record in candidates:
            if len(chosen) < limit:
                chosen.setdefault(id(record), record)
    longest = _rank_requests(chosen.values(), lambda record: record.duration_ns)
    return sorted(longest, key=lambda record: record.span_id not in missed)


def _rank_requests(records: Iterable[RequestRecord], key: Any) -> list[RequestRecord]:
    return sorted(records, key=lambda record: (-key(record), record.arrived_at, record.span_id))


# ── timeline ─────────────────────────────────────────────────────────────────────────────────────────────────────


def queue_intervals(records: Iterable[RequestRecord]) -> list[tuple[int, int]]:
    """Returns the intervals in which requests were queued."""
    stages = (record.find_stage(semconv.SPAN_QUEUE) for record in records)
    return [(stage.started_at, stage.ended_at) for stage in stages if stage is not None]


def _running_intervals(record: RequestRecord) -> list[tuple[int, int]]:
    """Returns the intervals in which a request was in flight but not queued."""
    queue = record.find_stage(semconv.SPAN_QUEUE)
    if queue is None:
        return [(record.arrived_at, record.ended_at)]
    return [(record.arrived_at, queue.started_at), (queue.ended_at, record.ended_at)]


def count_concurrent(intervals: Iterable[tuple[int, int]]) -> tuple[Any, Any]:
    """Returns the instants at which the number of open intervals changes, and the number from then on."""
    column = np.array([*intervals], np.int64).reshape(-1, 2)
    instants = np.concatenate([column[:, 0], column.max(axis=1)])
    change = np.repeat([1, -1], len(column))
    at, positions = np.unique(instants, return_inverse=True)
    return at, np.cumsum(np.bincount(positions, weights=change, minlength=len(at))).astype(np.int64)


def _build_bins(recording: RecordingContents, began: int, ended: int) -> list[TimelineBin]:
    width = max(ended - began, 1)
    in_flight = [run for record in recording.records for run in _running_intervals(record)]
    in_flight += [(arrived_at, ended + 1) for arrived_at in recording.unfinished_arrivals]
    running = _bin_maxima(count_concurrent(in_flight), began, width)
    queued = _bin_maxima(count_concurrent(queue_intervals(recording.records)), began, width)
    steps = np.array(
        [(step.ended_at, step.ended_at - step.started_at, step.prefill_tokens) for step in recording.steps],
        np.int64,
    ).reshape(-1, 3)
    bin_numbers = np.minimum((steps[:, 0] - began) * BIN_COUNT // width, BIN_COUNT - 1)
    bins = []
    for number in range(BIN_COUNT):
        _, lengths, prompts = steps[bin_numbers == number].T
        longest, median = (int(lengths.max()), float(np.median(lengths))) if len(lengths) else (0, 0.0)
        bins.append(
            TimelineBin(int(running[number]), int(queued[number]), longest, median, int(prompts.sum()))
        )
    return bins


def _bin_maxima(changes: tuple[Any, Any], began: int, width: int) -> Any:
    """Returns the maximum level in each bin, including the level at its begin."""
    at, level = changes
    edges = began + np.arange(BIN_COUNT, dtype=np.int64) * width // BIN_COUNT
    before = np.searchsorted(at, edges, side="right") - 1
    maxima = np.where(before >= 0, level[before] if len(level) else 0, 0)
    inside = at >= began
    bin_numbers = np.minimum((at[inside] - began) * BIN_COUNT // width, BIN_COUNT - 1)
    np.maximum.at(maxima, bin_numbers, level[inside])
    return maxima
