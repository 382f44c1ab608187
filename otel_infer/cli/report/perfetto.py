"""What a tape tells as Chrome trace events, for ui.perfetto.dev or chrome://tracing. Pure; the same for the same tape.

A track for each engine with its steps, one for each request with its stages, one for each cause of pauses, and counters.
Slices of a track lie inside or beside each other; what would cut another gets a track of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.report.summary import RecordingContents, count_concurrent, queue_intervals
from otel_infer.export.spans.tree import request_name
from otel_infer.ringbuffer.events import ABORTED, ERROR, OK

ENGINES, REQUESTS = 1, 2
"""The numbers of the two processes in the trace."""
MAX_NAME_CHARS = 120
GRID_NS = 125
"""An eighth of a µs is exact in binary: so wherever a reader adds begin and length, or makes ns of them, slices meet."""

TraceEvent = dict[str, Any]


class TraceSlice(NamedTuple):
    """An interval to draw; monotonic ns."""

    name: str
    started_at: int
    ended_at: int
    args: dict[str, Any]


def render_trace(told: RecordingContents) -> str:
    """The JSON text."""
    offset = told.records[0].wall_offset if told.records else 0
    began = told.time_range()[0]
    about = {"began_unix_ns": str(began + offset)} if offset else {}
    said = {"traceEvents": build_events(told), "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(said, separators=(",", ":"), allow_nan=False)


def build_events(told: RecordingContents) -> list[TraceEvent]:
    """Metadata, slices and counters; µs since the first instant of the tape."""
    began = told.time_range()[0]
    drawing = _TraceBuilder(began)
    drawing.add_process(ENGINES, "engines")
    drawing.add_process(REQUESTS, "requests")
    for (engine, pid), steps in _group_by_engine(told.steps).items():
        drawing.add_track(ENGINES, f"steps of {engine or 'the engine'} (pid {pid})", _step_slices(steps))
        drawing.add_counters(
            f"scheduler of {engine} (pid {pid})",
            ((s.started_at, _scheduler_counters(s)) for s in steps),
            ENGINES,
        )
    for cause in sorted({pause.cause for pause in told.pauses}):
        pauses = [
            TraceSlice(cause, pause.started_at, pause.ended_at, {})
            for pause in told.pauses
            if pause.cause == cause
        ]
        drawing.add_track(ENGINES, f"pauses: {cause}", pauses)
    for record in sorted(told.records, key=lambda record: (record.arrived_at, record.span_id)):
        drawing.add_track(
            REQUESTS, f"{record.trace_id.hex()[:8]} {request_name(record)}", _request_slices(record)
        )
    last = told.time_range()[1] + 1
    in_flight = [(r.arrived_at, r.ended_at) for r in told.records] + [
        (at, last) for at in told.unfinished_arrivals
    ]
    for name, intervals in (("in flight", in_flight), ("waiting", queue_intervals(told.records))):
        at, level = count_concurrent(intervals)
        drawing.add_counters(name, ((t, {name: n}) for t, n in zip(at.tolist(), level.tolist())), REQUESTS)
    return drawing.events


class _TraceBuilder:
    """Events, and which tracks there are."""

    def __init__(self, began: int) -> None:
        self.events: list[TraceEvent] = []
        self._began = began
        self._tracks = 0

    def add_process(self, pid: int, name: str) -> None:
        self._add_metadata("process_name", pid, 0, {"name": name})
        self._add_metadata("process_sort_index", pid, 0, {"sort_index": pid})

    def add_track(self, pid: int, name: str, slices: Iterable[TraceSlice]) -> None:
        """As many tracks as it takes for nothing to be cut."""
        for number, lane in enumerate(assign_lanes(slices)):
            self._tracks += 1
            self._add_metadata(
                "thread_name",
                pid,
                self._tracks,
                {"name": _shorten_text(name) + (" (beside)" if number else "")},
            )
            self._add_metadata("thread_sort_index", pid, self._tracks, {"sort_index": self._tracks})
            for one in lane:
                if one.ended_at < self._began:
                    continue
                at = self._to_us(one.started_at)
                length = self._to_us(one.ended_at) - at
                self.events.append({"name": _shorten_text(one.name), "ph": "X", "pid": pid, "tid": self._tracks,
                                    "ts": at, "dur": length, "args": one.args})  # fmt: skip

    def add_counters(self, name: str, values: Iterable[tuple[int, dict[str, int]]], pid: int) -> None:
        for at, said in values:
            self.events.append(
                {
                    "name": _shorten_text(name),
                    "ph": "C",
                    "pid": pid,
                    "tid": 0,
                    "ts": self._to_us(at),
                    "args": said,
                }
            )

    def _add_metadata(self, name: str, pid: int, tid: int, said: dict[str, Any]) -> None:
        self.events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": said})

    def _to_us(self, at: int) -> float:
        return max(at - self._began, 0) // GRID_NS / (1000 // GRID_NS)


def assign_lanes(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Slices in order, on lanes on which any two lie beside or inside each other; the first lane takes what it can."""
    lanes: list[
        tuple[list[TraceSlice], list[int]]
    ] = []  # what lies on it; the ends of what is open there, innermost last
    for one in sorted(slices, key=lambda one: (one.started_at, -one.ended_at)):
        lane, ends = _find_lane(one, lanes)
        lane.append(one)
        ends.append(one.ended_at)
    return [lane for lane, _ in lanes]


def _find_lane(
    one: TraceSlice, lanes: list[tuple[list[TraceSlice], list[int]]]
) -> tuple[list[TraceSlice], list[int]]:
    """The first lane on which it cuts nothing; a new one if there is none."""
    for lane, ends in lanes:
        while ends and ends[-1] <= one.started_at:
            ends.pop()
        if not ends or one.ended_at <= ends[-1]:
            return lane, ends
    lanes.append(([], []))
    return lanes[-1]


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────


def _group_by_engine(steps: Sequence[StepRecord]) -> dict[tuple[str, int], list[StepRecord]]:
    found: dict[tuple[str, int], list[StepRecord]] = {}
    for step in sorted(steps, key=lambda step: (step.engine, step.pid, step.started_at, step.step)):
        found.setdefault((step.engine, step.pid), []).append(step)
    return found


def _step_slices(steps: Iterable[StepRecord]) -> list[TraceSlice]:
    """Two of an engine that are in flight at once are on two tracks."""
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
    """The request, its stages in it, and the pauses it waited for."""
    said: dict[str, Any] = {
        "trace_id": record.trace_id.hex(),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "outcome": {OK: "ok", ERROR: "error", ABORTED: "aborted"}.get(record.outcome, ""),
    }
    if record.error_type:
        said["error_type"] = _shorten_text(record.error_type)
    if record.breakdown is not None:
        said |= {f"blame {cause} ms": length / 1e6 for cause, length in record.breakdown.causes.items()}
        if record.breakdown.interferer is not None:
            said["held up most by trace"] = record.breakdown.interferer.trace_id.hex()
    slices = [TraceSlice(request_name(record), record.arrived_at, record.ended_at, said)]
    slices += [TraceSlice(s.name, s.started_at, max(s.ended_at, s.started_at), {}) for s in record.stages]
    for pause in record.all_pauses:
        begin, end = max(pause.started_at, record.arrived_at), min(pause.ended_at, record.ended_at)
        slices.append(TraceSlice(f"pause: {pause.cause}", begin, end, {}))
    return slices


def _shorten_text(text: str) -> str:
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"
