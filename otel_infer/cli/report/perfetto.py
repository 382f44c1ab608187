"""Renders a tape as Chrome trace events, for ui.perfetto.dev or chrome://tracing. Pure and deterministic.

There is one track per engine (steps), per request (stages) and per cause of pauses, and counters. Slices of a
track are nested or disjoint; a slice that would overlap another partly moves to an extra track.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.report.summary import RecordingContents, count_concurrent, queue_intervals
from otel_infer.export.spans.tree import request_name
from otel_infer.ringbuffer.events import OUTCOME_NAMES

ENGINES, REQUESTS = 1, 2
"""The ids of the two processes in the trace."""
MAX_NAME_CHARS = 120
GRID_NS = 125
"""1/8 µs is exact in binary, so begin plus length is exact in the viewer and adjacent slices meet."""

TraceEvent = dict[str, Any]


class TraceSlice(NamedTuple):
    """An interval to draw; monotonic ns."""

    name: str
    started_at: int
    ended_at: int
    args: dict[str, Any]


def render_trace(recording: RecordingContents) -> str:
    """Returns the JSON text of the trace."""
    offset = recording.records[0].wall_offset if recording.records else 0
    began = recording.time_range()[0]
    metadata = {"began_unix_ns": str(began + offset)} if offset else {}
    trace = {"traceEvents": build_events(recording), "displayTimeUnit": "ms", "otherData": metadata}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def build_events(recording: RecordingContents) -> list[TraceEvent]:
    """Returns metadata, slices and counters; timestamps in µs since the first instant of the tape."""
    began = recording.time_range()[0]
    builder = _TraceBuilder(began)
    builder.add_process(ENGINES, "engines")
    builder.add_process(REQUESTS, "requests")
    for (engine, pid), steps in _group_by_engine(recording.steps).items():
        builder.add_track(ENGINES, f"steps of {engine or 'the engine'} (pid {pid})", _step_slices(steps))
        builder.add_counters(
            f"scheduler of {engine} (pid {pid})",
            ((s.started_at, _scheduler_counters(s)) for s in steps),
            ENGINES,
        )
    for cause in sorted({pause.cause for pause in recording.pauses}):
        pauses = [
            TraceSlice(cause, pause.started_at, pause.ended_at, {})
            for pause in recording.pauses
            if pause.cause == cause
        ]
        builder.add_track(ENGINES, f"pauses: {cause}", pauses)
    for record in sorted(recording.records, key=lambda record: (record.arrived_at, record.span_id)):
        builder.add_track(
            REQUESTS, f"{record.trace_id.hex()[:8]} {request_name(record)}", _request_slices(record)
        )
    last = recording.time_range()[1] + 1
    in_flight = [(r.arrived_at, r.ended_at) for r in recording.records] + [
        (at, last) for at in recording.unfinished_arrivals
    ]
    for name, intervals in (("in flight", in_flight), ("waiting", queue_intervals(recording.records))):
        at, level = count_concurrent(intervals)
        builder.add_counters(name, ((t, {name: n}) for t, n in zip(at.tolist(), level.tolist())), REQUESTS)
    return builder.events


class _TraceBuilder:
    """Collects trace events and numbers the tracks. `began`: the first instant (monotonic ns)."""

    def __init__(self, began: int) -> None:
        self.events: list[TraceEvent] = []
        self._began = began
        self._tracks = 0

    def add_process(self, pid: int, name: str) -> None:
        self._add_metadata("process_name", pid, 0, {"name": name})
        self._add_metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def add_track(self, pid: int, name: str, slices: Iterable[TraceSlice]) -> None:
        """Adds a track, and extra tracks for slices that overlap partly."""
        for number, lane in enumerate(assign_lanes(slices)):
            self._tracks += 1
            self._add_metadata(
                "thread_name",
                pid,
                self._tracks,
                {"name": _shorten_text(name) + (" (beside)" if number else "")},
            )
            self._add_metadata("thread_sort_index", pid, self._tracks, {"sort_index": self._tracks})
            for piece in lane:
                if piece.ended_at < self._began:
                    continue
                at = self._to_us(piece.started_at)
                length = self._to_us(piece.ended_at) - at
                self.events.append({"name": _shorten_text(piece.name), "ph": "X", "pid": pid, "tid": self._tracks,
                                    "ts": at, "dur": length, "args": piece.args})  # fmt: skip

    def add_counters(self, name: str, values: Iterable[tuple[int, dict[str, int]]], pid: int) -> None:
        for at, counts in values:
            self.events.append(
                {
                    "name": _shorten_text(name),
                    "ph": "C",
                    "pid": pid,
                    "tid": 0,
                    "ts": self._to_us(at),
                    "args": counts,
                }
            )

    def _add_metadata(self, name: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        self.events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args})

    def _to_us(self, at: int) -> float:
        return max(at - self._began, 0) // GRID_NS / (1000 // GRID_NS)


def assign_lanes(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Returns the slices in order, on lanes where any two are disjoint or nested.

    Each slice takes the first free lane.
    """
    lanes: list[
        tuple[list[TraceSlice], list[int]]
    ] = []  # its slices; the ends of its open slices, innermost last
    for piece in sorted(slices, key=lambda piece: (piece.started_at, -piece.ended_at)):
        lane, ends = _find_lane(piece, lanes)
        lane.append(piece)
        ends.append(piece.ended_at)
    return [lane for lane, _ in lanes]


def _find_lane(
    piece: TraceSlice, lanes: list[tuple[list[TraceSlice], list[int]]]
) -> tuple[list[TraceSlice], list[int]]:
    """Returns the first lane on which the slice overlaps no other partly; a new lane if there is none."""
    for lane, ends in lanes:
        while ends and ends[-1] <= piece.started_at:
            ends.pop()
        if not ends or piece.ended_at <= ends[-1]:
            return lane, ends
    lanes.append(([], []))
    return lanes[-1]


# ── slices ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _group_by_engine(steps: Sequence[StepRecord]) -> dict[tuple[str, int], list[StepRecord]]:
    groups: dict[tuple[str, int], list[StepRecord]] = {}
    for step in sorted(steps, key=lambda step: (step.engine, step.pid, step.started_at, step.step)):
        groups.setdefault((step.engine, step.pid), []).append(step)
    return groups


def _step_slices(steps: Iterable[StepRecord]) -> list[TraceSlice]:
    """Returns the steps of an engine as slices. Concurrent steps of one engine end up on two tracks."""
    return [
        TraceSlice(f"{step.kind} {step.size}", step.started_at, step.ended_at, {
            "step": step.step, "batch_size": step.size, "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens, "waiting": step.waiting,
        })
        for step in steps
    ]  # fmt: skip


def _scheduler_counters(step: StepRecord) -> dict[str, int]:
    return {"running": step.running, "waiting": step.waiting}


def _request_slices(record: RequestRecord) -> list[TraceSlice]:
    """Returns the slices of a request, its stages and its pauses."""
    args: dict[str, Any] = {
        "trace_id": record.trace_id.hex(),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "outcome": OUTCOME_NAMES.get(record.outcome, ""),
    }
    if record.error_type:
        args["error_type"] = _shorten_text(record.error_type)
    if record.breakdown is not None:
        args |= {f"cause {cause} ms": length / 1e6 for cause, length in record.breakdown.causes.items()}
        if record.breakdown.interferer is not None:
            args["delayed most by trace"] = record.breakdown.interferer.trace_id.hex()
    slices = [TraceSlice(request_name(record), record.arrived_at, record.ended_at, args)]
    slices += [TraceSlice(s.name, s.started_at, max(s.ended_at, s.started_at), {}) for s in record.stages]
    for pause in record.all_pauses:
        begin, end = max(pause.started_at, record.arrived_at), min(pause.ended_at, record.ended_at)
        slices.append(TraceSlice(f"pause: {pause.cause}", begin, end, {}))
    return slices


def _shorten_text(text: str) -> str:
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"
