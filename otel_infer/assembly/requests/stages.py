"""Builds the stages of a request that is over: intervals between observed instants.

No stage is the remainder of another, so time between two stages stays unattributed. A stage lasts until the
end of a request only if the request failed in it. No event that could have ended the stage may be missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.records.request import GenerationGap, RequestRecord, Stage
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

Attributes = dict[str, events.Value]
Interval = tuple[int, int]
DescribeStage = Callable[[OpenRequest, int, int], Attributes]
NO_INTERVAL: Interval = (0, 0)
RESULT_STAGES = frozenset((semconv.SPAN_FORWARD, semconv.SPAN_D2H))
"""Stages after which a result exists that needs no decoding."""
UNWINDING_NS = 1_000_000
"""Within this time a cancellation passes from the stage that it ended to the end of the request."""
_WAITS = frozenset((semconv.SPAN_ACCEPT, *semconv.WAIT_STAGES))


class Milestones(NamedTuple):
    """Instants of a request that is over, none after its end; 0 = not seen.

    `finished`: the engine ended all sequences. `is_failed`: the outcome is not `OK`.
    `reported_tokens`: from the engine.
    """

    submitted_at: int
    scheduled_at: int
    first_token_at: int
    last_token_at: int
    response_at: int
    finished: bool
    is_failed: bool
    reported_tokens: int

    @property
    def has_token(self) -> bool:
        """Whether a token was observed."""
        return bool(self.first_token_at or self.last_token_at)


def build_stages(record: RequestRecord, request: OpenRequest, milestones: Milestones) -> list[Stage]:
    """Returns all stages in the order in which they began. Recorded stages replace derived ones."""
    stages = _recorded_stages(record, request) if request.stages else []
    names = {stage.name for stage in stages}
    seen_at = request.arrived.at
    later_starts = [stage.started_at for stage in stages if _follows_ingress(stage, seen_at)]
    if milestones.submitted_at or milestones.scheduled_at:
        later_starts += [at for at in (milestones.submitted_at, milestones.scheduled_at) if at]
    derived: list[tuple[str, Interval, DescribeStage | None]] = [
        (semconv.SPAN_INGRESS, _ingress_interval(record, request, milestones, later_starts), None),
    ]
    if milestones.submitted_at or milestones.scheduled_at or milestones.first_token_at:
        derived += (
            (semconv.SPAN_QUEUE, _queue_interval(record, milestones), _queue_attributes),
            (semconv.SPAN_PREFILL, _prefill_interval(record, milestones, names), _prefill_attributes),
            (semconv.SPAN_DECODE, _decode_interval(record, milestones), _decode_attributes),
        )
    ended_with = _postprocess_interval(record, request, milestones, bool(later_starts))
    derived.append((semconv.SPAN_POSTPROCESS, ended_with, _egress_attributes))
    for name, (began, ended), describe in derived:
        if began < ended and name not in names:
            stages.append(Stage(name, began, ended, describe(request, began, ended) if describe else {}))
    stages.sort(key=attrgetter("started_at"))
    return stages


def _follows_ingress(stage: Stage, seen_at: int) -> bool:
    """Returns whether a stage ends the ingress of a request that the server saw at `seen_at`."""
    return stage.name not in _WAITS and stage.started_at >= seen_at


def stage_at_end(record: RequestRecord, request: OpenRequest, milestones: Milestones) -> str:
    """Returns the stage in which the request ended: the one that raised, else the last one that had begun.

    An engine that had not ended the request determines the stage itself. Empty if none is known, and for a request that
    was aborted between stages.
    """
    is_in_engine = (milestones.submitted_at or milestones.scheduled_at) and not milestones.finished
    if not is_in_engine and (raised := _find_raised_stage(request)):
        return raised
    if milestones.has_token:
        return semconv.SPAN_POSTPROCESS if milestones.finished else semconv.SPAN_DECODE
    if milestones.scheduled_at and record.generative:
        return semconv.SPAN_PREFILL
    if milestones.submitted_at and not milestones.scheduled_at:
        return semconv.SPAN_QUEUE
    open_stages = [stage for stage in record.stages if stage.ended_at == record.ended_at]
    candidates = open_stages or record.stages
    if record.outcome == events.ABORTED:
        candidates = [stage for stage in candidates if stage.ended_at >= record.ended_at - UNWINDING_NS]
    if candidates:
        return candidates[-1].name
    return semconv.SPAN_INGRESS if not record.stages and _is_http(record, request) else ""


def _find_raised_stage(request: OpenRequest) -> str:
    """Returns the innermost stage that the last exception left; empty if the last stage to end did not raise."""
    name, started_at = "", 0
    for event in sorted(request.stages, key=attrgetter("at"), reverse=True):
        if getattr(event, "items", 0) != events.RAISED or event.started_at < started_at:
            break
        name, started_at = event.stage, event.started_at
    return name


def _recorded_stages(record: RequestRecord, request: OpenRequest) -> list[Stage]:
    stages: list[Stage] = []
    arrived_at, finished_at = record.arrived_at, record.ended_at
    for event in request.stages:
        ended_at, started_at, name, *_ = event
        started_at = started_at if started_at > arrived_at else arrived_at
        ended_at = ended_at if ended_at < finished_at else finished_at
        if started_at <= ended_at:
            fields = name, started_at, ended_at, _recorded_attributes(event)
            stages.append(events.make_tuple(Stage, fields))
    return stages


def _recorded_attributes(event: events.StageEnded | events.BytesMoved) -> Attributes:
    if isinstance(event, events.StageEnded):
        return _describe_items(event)
    pinned = {} if event.pinned == events.PINNED_UNKNOWN else {semconv.TRANSFER_PINNED: bool(event.pinned)}
    return {semconv.TRANSFER_SIZE: event.size, **pinned}


def _describe_items(event: events.StageEnded) -> Attributes:
    if event.items <= 0:
        return {}
    if event.stage == semconv.SPAN_POOL_WAIT:
        return {semconv.POOL_SIZE: event.items}
    if event.stage == semconv.SPAN_LOCK_WAIT:
        return {semconv.WAIT_KIND: semconv.WAIT_KINDS[event.items - 1]}
    return {semconv.ITEMS: event.items}


def _is_http(record: RequestRecord, request: OpenRequest) -> bool:
    """Returns whether an HTTP server opened the request.

    An HTTP server does not know the operation at arrival, unlike an engine call.
    """
    arrived = request.arrived
    return bool(record.server_span_id or record.status_code or (arrived.name and not arrived.operation))


def _ingress_interval(
    record: RequestRecord, request: OpenRequest, milestones: Milestones, later_starts: list[int]
) -> Interval:
    if request.early_events_lost or not _is_http(record, request):
        return NO_INTERVAL
    called_at = max(record.arrived_at, request.arrived.at)
    if later_starts:
        return called_at, min(later_starts)
    return (called_at, record.ended_at) if milestones.is_failed and not milestones.has_token else NO_INTERVAL


def _queue_interval(record: RequestRecord, milestones: Milestones) -> Interval:
    if not milestones.submitted_at:
        return NO_INTERVAL
    return milestones.submitted_at, milestones.scheduled_at or _end_before_token(record, milestones)


def _end_before_token(record: RequestRecord, milestones: Milestones) -> int:
    """Returns when a request failed that certainly had no token; 0 for other requests."""
    failed_before = _failed_in_engine(record, milestones) and not milestones.has_token
    return record.ended_at if failed_before else 0


def _failed_in_engine(record: RequestRecord, milestones: Milestones) -> bool:
    """Returns whether the request certainly failed before the engine had ended it."""
    return milestones.is_failed and not record.telemetry_lost and not milestones.finished


def _queue_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    if not began <= request.received_at <= ended:
        return {}
    return {
        semconv.QUEUE_HIDDEN: (request.received_at - began) / 1e9,
        semconv.QUEUE_SCHEDULER: (ended - request.received_at) / 1e9,
    }


def _prefill_interval(record: RequestRecord, milestones: Milestones, recorded_names: set[str]) -> Interval:
    if not milestones.scheduled_at or not record.generative or semconv.SPAN_DECODE in recorded_names:
        return NO_INTERVAL
    # An embedding generates no token.
    if milestones.finished and not (
        milestones.reported_tokens or milestones.first_token_at or record.telemetry_lost
    ):
        return milestones.scheduled_at, milestones.last_token_at
    return milestones.scheduled_at, milestones.first_token_at or _end_before_token(record, milestones)


def _prefill_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    attributes: Attributes = {semconv.KV_SIZE: request.cache[0].size} if len(request.cache) > 1 else {}
    for _, log, step in _list_chunks(request)[:1]:
        attributes |= _kv_attribute(semconv.KV_UTILIZATION_START, log.table.kv_usage_at(step))
    return attributes


def _decode_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    attributes: Attributes = {semconv.KV_SIZE: request.cache[-1].size} if request.cache else {}
    for _, log, step in [chunk for chunk in _list_chunks(request) if chunk[0] < began][-1:]:
        attributes |= _kv_attribute(semconv.KV_UTILIZATION_START, log.table.kv_usage_at(step + 1))
    if request.runs:
        log, _, step, _ = request.runs[-1]
        attributes |= _kv_attribute(semconv.KV_UTILIZATION_END, log.table.kv_usage_at(step))
    return attributes


def _list_chunks(request: OpenRequest) -> list[tuple[int, EngineStepLog, int]]:
    """Returns for each chunk of its prompt when it was scheduled, the engine's log, and the step."""
    return sorted(
        [(chunk.at, log, step) for log, chunks in request.chunks.items() for step, chunk in chunks.items()],
        key=itemgetter(0),
    )


def _kv_attribute(key: str, utilization: float) -> Attributes:
    return {} if utilization != utilization else {key: utilization}


def _decode_interval(record: RequestRecord, milestones: Milestones) -> Interval:
    if not milestones.first_token_at:
        return NO_INTERVAL
    ended_at = record.ended_at if _failed_in_engine(record, milestones) else milestones.last_token_at
    return milestones.first_token_at, ended_at


def _postprocess_interval(
    record: RequestRecord, request: OpenRequest, milestones: Milestones, has_other_stages: bool
) -> Interval:
    # Nothing was generated. What follows the model is postprocessing.
    if not (milestones.submitted_at or milestones.scheduled_at or milestones.has_token):
        if not milestones.response_at or not has_other_stages:
            return NO_INTERVAL
        return min(
            _find_result_time(request) or milestones.response_at, milestones.response_at
        ), record.ended_at
    if milestones.is_failed and not milestones.finished:
        return NO_INTERVAL
    ended = request.ended
    is_observed = (
        record.chunks
        or record.status_code
        or milestones.is_failed
        or (ended is not None and ended.detokenize_ns)
    )
    return (
        (milestones.last_token_at, record.ended_at)
        if milestones.last_token_at and is_observed
        else NO_INTERVAL
    )


def _find_result_time(request: OpenRequest) -> int:
    """Returns when the last call of a model, or the last copy from a device, ended; 0 = there was none."""
    return max([event.at for event in request.stages if event.stage in RESULT_STAGES], default=0)


def _egress_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    end_event = request.ended
    if end_event is None:
        return {}
    attributes: Attributes = {semconv.SEND_WAIT: end_event.send_wait_ns / 1e9}
    if end_event.detokenize_ns:
        attributes[semconv.DETOKENIZE_DURATION] = end_event.detokenize_ns / 1e9
    if end_event.chunks:
        attributes[semconv.RESPONSE_CHUNKS] = end_event.chunks
    return attributes


def apply_generation_gaps(record: RequestRecord, request: OpenRequest) -> None:
    """Sets the generation gaps, the number of concurrent sequences, and the rows before which the gaps lie."""
    ends = sorted([event.at for event in request.finished])
    submitted, concurrent = request.submissions[0][1], [request.submissions[0][1]]
    gap_rows: list[int] = []
    for resubmitted_at, sequences in request.submissions[1:]:
        finished_before = bisect_right(ends, resubmitted_at)
        gap = (
            _find_gap(resubmitted_at, ends[finished_before - 1], record, request)
            if finished_before >= submitted
            else None
        )
        submitted += sequences
        if gap is None:
            concurrent[-1] += sequences
            continue
        concurrent.append(sequences)
        record.generation_gaps += (gap,)
        row = _find_row(record, resubmitted_at)
        if record.steps is not None and 0 < row < len(record.steps):
            gap_rows.append(row)
    record.concurrent_sequences = max(concurrent)
    if record.steps is not None:
        record.steps.gap_rows = tuple(gap_rows)


def _find_gap(
    resubmitted_at: int, finished_at: int, record: RequestRecord, request: OpenRequest
) -> GenerationGap | None:
    """Returns the gap before a submission; None if a step that had begun by then still delivered a token."""
    rows, row = record.steps, _find_row(record, resubmitted_at)
    if resubmitted_at >= record.ended_at or (
        rows is not None and row < len(rows) and rows.started_at[row] < resubmitted_at
    ):
        return None
    since = int(rows.ended_at[row - 1]) if rows is not None and row else finished_at
    began = sorted([chunk.at for chunks in request.chunks.values() for chunk in chunks.values()])
    at = bisect_left(began, resubmitted_at)
    return (
        GenerationGap(since, resubmitted_at, began[at] if at < len(began) else 0)
        if since < resubmitted_at
        else None
    )


def _find_row(record: RequestRecord, at: int) -> int:
    """Returns its first row that was done after this instant."""
    return int(record.steps.ended_at.searchsorted(at, "right")) if record.steps is not None else 0
