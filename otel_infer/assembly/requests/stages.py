"""The stages of a request that is over: intervals between instants that were seen.

None is the remainder of another: what lies between two stages stays unattributed. A stage lasts to the end of a request
only if the request died in it, and only if nothing is missing that could have ended it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter, itemgetter
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.records.request import GenerationGap, RequestRecord, Stage
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

Attributes = dict[str, events.Value]
Interval = tuple[int, int]
NO_INTERVAL: Interval = (0, 0)


class Milestones(NamedTuple):
    """Instants of a request that is over, none after its end; 0 = not seen. `last_at`: the last token.

    `finished`: the engine was done with it. `died`: it ended otherwise than well. `said`: tokens, by the engine.
    """

    submitted_at: int
    scheduled_at: int
    first_token_at: int
    last_token_at: int
    response_at: int
    finished: bool
    died: bool
    reported_tokens: int

    @property
    def has_token(self) -> bool:
        return bool(self.first_token_at or self.last_token_at)


def build_stages(record: RequestRecord, request: OpenRequest, life: Milestones) -> list[Stage]:
    """All stages, in the order in which they began. What was said goes before what would be derived."""
    stages = _recorded_stages(record, request) if request.stages else []
    names = {stage.name for stage in stages}
    touched = [stage.started_at for stage in stages]
    touched += [at for at in (life.submitted_at, life.scheduled_at) if at]
    kinds = (
        (semconv.SPAN_INGRESS, _ingress_interval(record, request, life, touched), None),
        (semconv.SPAN_QUEUE, _queue_interval(record, life), _queue_attributes),
        (semconv.SPAN_PREFILL, _prefill_interval(record, life, names), _prefill_attributes),
        (semconv.SPAN_DECODE, _decode_interval(record, life), _decode_attributes),
        (
            semconv.SPAN_POSTPROCESS,
            _postprocess_interval(record, request, life, bool(touched)),
            _egress_attributes,
        ),
    )
    for name, (began, ended), described in kinds:
        if began < ended and name not in names:
            stages.append(Stage(name, began, ended, described(request, began, ended) if described else {}))
    stages.sort(key=attrgetter("started_at"))
    return stages


def stage_at_end(record: RequestRecord, request: OpenRequest, life: Milestones) -> str:
    """The stage the request was in when it ended: the last one that had begun; empty if none is known."""
    if life.has_token:
        return semconv.SPAN_POSTPROCESS if life.finished else semconv.SPAN_DECODE
    if life.scheduled_at and record.generative:
        return semconv.SPAN_PREFILL
    if life.submitted_at and not life.scheduled_at:
        return semconv.SPAN_QUEUE
    going = [stage for stage in record.stages if stage.ended_at == record.ended_at]
    begun = going or record.stages
    if begun:
        return begun[-1].name
    return semconv.SPAN_INGRESS if _is_http(record, request) else ""


def _recorded_stages(record: RequestRecord, request: OpenRequest) -> list[Stage]:
    stages = []
    for fact in request.stages:
        started_at, ended_at = max(fact.started_at, record.arrived_at), min(fact.at, record.ended_at)
        if started_at <= ended_at:
            stages.append(Stage(fact.stage, started_at, ended_at, _recorded_attributes(fact)))
    return stages


def _recorded_attributes(fact: events.StageEnded | events.BytesMoved) -> Attributes:
    if isinstance(fact, events.StageEnded):
        return {semconv.ITEMS: fact.items} if fact.items else {}
    pinned = {} if fact.pinned == events.PINNED_UNKNOWN else {semconv.TRANSFER_PINNED: bool(fact.pinned)}
    return {semconv.TRANSFER_SIZE: fact.size, **pinned}


def _is_http(record: RequestRecord, request: OpenRequest) -> bool:
    """Whoever opens a request for an engine's call knows the operation; an HTTP server does not yet."""
    arrived = request.arrived
    return bool(record.server_span_id or record.status_code or (arrived.name and not arrived.operation))


def _ingress_interval(
    record: RequestRecord, request: OpenRequest, life: Milestones, touched: list[int]
) -> Interval:
    if request.early_events_lost or not _is_http(record, request):
        return NO_INTERVAL
    if touched:
        return record.arrived_at, min(touched)
    return (record.arrived_at, record.ended_at) if life.died and not life.has_token else NO_INTERVAL


def _queue_interval(record: RequestRecord, life: Milestones) -> Interval:
    if not life.submitted_at:
        return NO_INTERVAL
    died_here = life.died and not record.telemetry_lost and not life.has_token and not life.finished
    return life.submitted_at, life.scheduled_at or (record.ended_at if died_here else 0)


def _queue_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    if not began <= request.received_at <= ended:
        return {}
    return {
        semconv.QUEUE_HIDDEN: (request.received_at - began) / 1e9,
        semconv.QUEUE_SCHEDULER: (ended - request.received_at) / 1e9,
    }


def _prefill_interval(record: RequestRecord, life: Milestones, said: set[str]) -> Interval:
    if not life.scheduled_at or not record.generative or semconv.SPAN_DECODE in said:
        return NO_INTERVAL
    if life.finished and not (
        life.reported_tokens or life.first_token_at or record.telemetry_lost
    ):  # an embedding has no token
        return life.scheduled_at, life.last_token_at
    died_here = life.died and not record.telemetry_lost and not life.has_token and not life.finished
    return life.scheduled_at, life.first_token_at or (record.ended_at if died_here else 0)


def _prefill_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    said: Attributes = {semconv.KV_SIZE: request.cache[0].size} if len(request.cache) > 1 else {}
    for _, log, step in _list_chunks(request)[:1]:
        said |= _kv_attribute(semconv.KV_UTILIZATION_START, log.table.kv_usage_at(step))
    return said


def _decode_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    said: Attributes = {semconv.KV_SIZE: request.cache[-1].size} if request.cache else {}
    for _, log, step in [chunk for chunk in _list_chunks(request) if chunk[0] < began][-1:]:
        said |= _kv_attribute(semconv.KV_UTILIZATION_START, log.table.kv_usage_at(step + 1))
    if request.runs:
        log, _, step, _ = request.runs[-1]
        said |= _kv_attribute(semconv.KV_UTILIZATION_END, log.table.kv_usage_at(step))
    return said


def _list_chunks(request: OpenRequest) -> list[tuple[int, EngineStepLog, int]]:
    """When each piece of its prompt was scheduled, and the step of which engine it was in."""
    return sorted(
        [(chunk.at, log, step) for log, chunks in request.chunks.items() for step, chunk in chunks.items()],
        key=itemgetter(0),
    )


def _kv_attribute(key: str, utilization: float) -> Attributes:
    return {} if utilization != utilization else {key: utilization}


def _decode_interval(record: RequestRecord, life: Milestones) -> Interval:
    if not life.first_token_at:
        return NO_INTERVAL
    died_here = life.died and not record.telemetry_lost and not life.finished
    return life.first_token_at, record.ended_at if died_here else life.last_token_at


def _postprocess_interval(
    record: RequestRecord, request: OpenRequest, life: Milestones, is_touched: bool
) -> Interval:
    if not (life.submitted_at or life.scheduled_at or life.has_token):  # nothing was generated
        return (life.response_at, record.ended_at) if life.response_at and is_touched else NO_INTERVAL
    if life.died and not life.finished:
        return NO_INTERVAL
    ended = request.ended
    is_seen = record.chunks or record.status_code or life.died or (ended is not None and ended.detokenize_ns)
    return (life.last_token_at, record.ended_at) if life.last_token_at and is_seen else NO_INTERVAL


def _egress_attributes(request: OpenRequest, began: int, ended: int) -> Attributes:
    said = request.ended
    if said is None:
        return {}
    attributes: Attributes = {semconv.SEND_WAIT: said.send_wait_ns / 1e9}
    if said.detokenize_ns:
        attributes[semconv.DETOKENIZE_DURATION] = said.detokenize_ns / 1e9
    if said.chunks:
        attributes[semconv.RESPONSE_CHUNKS] = said.chunks
    return attributes


def apply_generation_gaps(record: RequestRecord, request: OpenRequest) -> None:
    """Writes them into the record, and how many sequences there were at once; before which rows they lie, into its steps."""
    ends = sorted([fact.at for fact in request.finished])
    asked, at_once = request.submissions[0][1], [request.submissions[0][1]]
    apart: list[int] = []
    for again, sequences in request.submissions[1:]:
        over = bisect_right(ends, again)
        absence = _find_gap(again, ends[over - 1], record, request) if over >= asked else None
        asked += sequences
        if absence is None:
            at_once[-1] += sequences
            continue
        at_once.append(sequences)
        record.generation_gaps += (absence,)
        row = _find_row(record, again)
        if record.steps is not None and 0 < row < len(record.steps):
            apart.append(row)
    record.concurrent_sequences = max(at_once)
    if record.steps is not None:
        record.steps.gap_rows = tuple(apart)


def _find_gap(again: int, finished: int, record: RequestRecord, request: OpenRequest) -> GenerationGap | None:
    """None where a step that had begun by then brought it something all the same."""
    rows, row = record.steps, _find_row(record, again)
    if again >= record.ended_at or (rows is not None and row < len(rows) and rows.started_at[row] < again):
        return None
    since = int(rows.ended_at[row - 1]) if rows is not None and row else finished
    began = sorted([chunk.at for chunks in request.chunks.values() for chunk in chunks.values()])
    at = bisect_left(began, again)
    return GenerationGap(since, again, began[at] if at < len(began) else 0) if since < again else None


def _find_row(record: RequestRecord, at: int) -> int:
    """Its first step that was done after this instant."""
    return int(record.steps.ended_at.searchsorted(at, "right")) if record.steps is not None else 0
