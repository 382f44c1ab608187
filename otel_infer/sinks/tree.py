"""The spans of one request, as `docs/read-a-trace.md` draws them: server, request, stages, prefill steps.

Decode steps are not here: there are too many to be objects, `sinks.spans` writes them from columns, without what is the
same in all spans of a request (its `tracestate`). Span ids below the request are derived from its id, so that sending
again sends the same spans.
"""

from __future__ import annotations

import hashlib

from otel_infer import facts, keeper, semconv
from otel_infer.facts import Value
from otel_infer.otlp import Event, Link, Span
from otel_infer.records import RequestRecord, Stage

SERVER, INTERNAL = 2, 1
STATUS_UNSET, STATUS_ERROR = 0, 2
_SERVER_ATTRIBUTES = ("http.", "url.", "server.", "client.", "network.", "user_agent.")
_HTTP = "HTTP"
"""The word of the conventions for a method that is not known."""
_PAUSES = 32
"""Events for pauses on one request; the longest are told."""
_NOT_ERRORS = ("", semconv.ERROR_CLIENT_DISCONNECT, semconv.ERROR_CANCELLED)


def derived_id(span_id: bytes, name: str, number: int) -> bytes:
    """The id of a span below the request with this id; never zero."""
    digest = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=8, key=span_id).digest()
    return digest if any(digest) else b"\1" * 8


def spans_of(
    record: RequestRecord, decision: keeper.Decision, latency_attributes: bool = False
) -> list[Span]:
    """Server span (if it is ours), request span and stage spans, in this order; of a request that reached no engine the
    server span alone, which is then the live one and has what user code said of it."""
    http = {k: v for k, v in record.attributes.items() if k.startswith(_SERVER_ATTRIBUTES)}
    if record.status_code:
        http.setdefault(semconv.HTTP_RESPONSE_STATUS_CODE, record.status_code)
    attributes = request_attributes(record, decision)
    if is_server_only(record):
        name = record.span_name or server_name(record)
        server = _span(record, record.span_id, record.parent_span_id, name, SERVER, {**attributes, **http})
        return [_described(record, server, decision)]
    spans, parent = [], record.parent_span_id
    if record.server_span_id:
        spans.append(_span(record, record.server_span_id, parent, server_name(record), SERVER, http))
        parent, http = record.server_span_id, {}
    if latency_attributes:
        attributes.update(_latency(record))
    name = record.span_name or request_name(record)
    request = _span(record, record.span_id, parent, name, INTERNAL, {**attributes, **http})
    return [*spans, _described(record, request, decision), *_stages(record, decision)]


def is_server_only(record: RequestRecord) -> bool:
    """Whether the request span is the server span."""
    return record.server_span_id == record.span_id


def request_name(record: RequestRecord) -> str:
    """`chat llama-3-8b`, `inference`, …; method and route of a request that reached no engine."""
    if not record.operation:
        return server_name(record)
    return f"{record.operation} {record.model}" if record.model else record.operation


def server_name(record: RequestRecord) -> str:
    """Method and route, or the method alone where the route is not known."""
    route = record.attributes.get(semconv.HTTP_ROUTE)
    method = record.attributes.get(semconv.HTTP_REQUEST_METHOD) or record.name
    word = _HTTP if method == semconv.OTHER else method
    return f"{word} {route}" if route else str(word)


def request_attributes(record: RequestRecord, decision: keeper.Decision) -> dict[str, Value]:
    """Everything that is said of the request itself; usage stands here only."""
    said: dict[str, Value | None] = {
        semconv.OPERATION_NAME: record.operation,
        semconv.PROVIDER_NAME: record.provider,
        semconv.REQUEST_MODEL: record.model,
        semconv.REQUEST_MAX_TOKENS: record.max_tokens,
        semconv.USAGE_INPUT_TOKENS: record.input_tokens,
        semconv.USAGE_OUTPUT_TOKENS: record.output_tokens,
        semconv.RESPONSE_FINISH_REASONS: list(record.finish_reasons),
        semconv.SEQUENCES: record.sequences if record.sequences > 1 else 0,
        semconv.PREEMPTIONS: record.preemptions,
        semconv.TTFT: record.ttft_ns / 1e9,
        semconv.ENGINE: record.engine,
        semconv.DIED_IN: record.died_in,
        semconv.ERROR_TYPE: record.error_type,
        semconv.KEEP_REASON: decision.reason,
        semconv.SLO_MISSED: list(decision.missed),
        semconv.UNSAMPLED: decision.export and not record.sampled,
        semconv.TELEMETRY_LOST: record.telemetry_lost,
        semconv.FIRST_REQUEST: record.start is not None,
        semconv.PAUSES_LEFT_OUT: max(len(record.all_pauses) - _PAUSES, 0) if _is_kept(decision) else 0,
    }
    attributes = {key: value for key, value in said.items() if value}
    if record.blame is not None and record.operation:
        for cause, length in record.blame.causes.items():
            attributes[semconv.BLAME[cause]] = length / 1e9
        attributes[semconv.BLAME_TOP] = record.blame.top
    own = {k: v for k, v in record.attributes.items() if not k.startswith(_SERVER_ATTRIBUTES)}
    return {**own, **attributes}


def decode_attributes(record: RequestRecord, granted: int) -> dict[str, Value]:
    """Aggregates of all steps, whichever of them are written as spans. Lengths in s."""
    seen = record.summary
    if not seen.steps:
        return {}
    attributes: dict[str, Value] = {
        semconv.STEPS_COUNT: seen.steps,
        semconv.STEPS_SUM: seen.total / 1e9,
        semconv.STEPS_P50: seen.p50 / 1e9,
        semconv.STEPS_P95: seen.p95 / 1e9,
        semconv.STEPS_MAX: seen.longest / 1e9,
        semconv.STEPS_SLOWEST: seen.slowest,
        semconv.BATCH_SIZE_MAX: seen.batch_size_max,
    }
    if seen.gaps:
        attributes[semconv.ITL_MAX] = seen.gap_max / 1e9
    left_out = seen.steps - granted + record.steps_forgotten
    if left_out > 0:
        attributes[semconv.STEPS_LEFT_OUT] = left_out
    if record.discarded:
        attributes[semconv.STEPS_DISCARDED] = record.discarded
    return attributes


def _described(record: RequestRecord, span: Span, decision: keeper.Decision) -> Span:
    """With the events and links that were added to the live span, and the pauses if the request is kept."""
    events = [Event(event.at + record.wall_offset, event.name, event.attributes) for event in record.events]
    if _is_kept(decision):
        events = sorted([*events, *_pauses(record), *_marks(record)], key=lambda event: event.at)
    starts = [record.start] if record.start is not None else []
    links = [Link(trace_id, span_id) for trace_id, span_id in (*starts, *record.links)]
    offender = record.blame.offender if record.blame is not None else None
    if offender is not None:
        said: dict[str, Value] = {
            semconv.OFFENDER_DELAY: offender.length / 1e9,
            semconv.OFFENDER_CLASS: offender.named,
        }
        links.append(Link(offender.trace_id, offender.span_id, said))
    return span._replace(events=events, links=links)


def _is_kept(decision: keeper.Decision) -> bool:
    return decision.reason not in (keeper.REASON_NONE, keeper.REASON_UNSAMPLED)


def _pauses(record: RequestRecord) -> list[Event]:
    """Of each pause the part in which the request was there."""
    held_up = [
        (max(pause.started_at, record.arrived_at), min(pause.ended_at, record.ended_at), pause.cause)
        for pause in record.all_pauses
    ]
    longest = sorted(held_up, key=lambda pause: pause[0] - pause[1])[:_PAUSES]
    return [
        Event(
            begin + record.wall_offset,
            semconv.EVENT_PAUSE,
            {semconv.PAUSE_CAUSE: cause, semconv.PAUSE_DURATION: (end - begin) / 1e9},
        )
        for begin, end, cause in longest
    ]


def _marks(record: RequestRecord) -> list[Event]:
    return [
        Event(
            min(mark.at, record.ended_at) + record.wall_offset,
            semconv.EVENT_MARK,
            {
                semconv.MARK: mark.name,
                semconv.MARK_COUNT: mark.times,
                semconv.MARK_WINDOW: (mark.at - mark.since) / 1e9,
            },
        )
        for mark in record.marks[-_PAUSES:]
    ]


def _stages(record: RequestRecord, decision: keeper.Decision) -> list[Span]:
    spans = []
    for number, stage in enumerate(record.stages):
        attributes = dict(stage.attributes)
        if stage.name in semconv.DEVICE_STAGES:
            attributes[semconv.CLOCK] = semconv.CLOCK_HOST
        if stage.name == semconv.SPAN_DECODE:
            attributes.update(decode_attributes(record, decision.steps))
        span_id = derived_id(record.span_id, stage.name, number)
        spans.append(_interval(record, span_id, record.span_id, stage, attributes))
        if stage.name == semconv.SPAN_PREFILL and decision.prefill_steps:
            spans += _prefill_steps(record, span_id)
    return spans


def _prefill_steps(record: RequestRecord, parent: bytes) -> list[Span]:
    spans = []
    for chunk in record.prefill_steps:
        attributes: dict[str, Value] = {
            semconv.STEP_ID: chunk.step,
            semconv.STEP_TOKENS: chunk.tokens,
            semconv.BATCH_SIZE: chunk.batch_size,
        }
        stage = Stage(semconv.SPAN_PREFILL_STEP, chunk.started_at, chunk.ended_at, attributes)
        span_id = derived_id(record.span_id, stage.name, chunk.step)
        spans.append(_interval(record, span_id, parent, stage, attributes))
    return spans


def _interval(
    record: RequestRecord, span_id: bytes, parent: bytes, stage: Stage, attributes: dict[str, Value]
) -> Span:
    start, end = stage.started_at + record.wall_offset, stage.ended_at + record.wall_offset
    name, state = stage.name, record.tracestate
    return Span(record.trace_id, span_id, parent, name, INTERNAL, start, end, attributes, trace_state=state)


def _span(
    record: RequestRecord, span_id: bytes, parent: bytes, name: str, kind: int, attributes: dict[str, Value]
) -> Span:
    failed = record.outcome == facts.ERROR or (
        record.outcome == facts.ABORTED and record.error_type not in _NOT_ERRORS
    )
    status = STATUS_ERROR if failed else STATUS_UNSET
    if record.error_type and kind == SERVER:
        attributes = {**attributes, semconv.ERROR_TYPE: record.error_type}
    start, end = record.arrived_at + record.wall_offset, record.ended_at + record.wall_offset
    state = record.tracestate
    return Span(
        record.trace_id, span_id, parent, name, kind, start, end, attributes, status=status, trace_state=state
    )


def _latency(record: RequestRecord) -> dict[str, Value]:
    """The attributes of vLLM's request span (0.33 `OutputProcessor.do_tracing`), with its meaning; s."""
    pairs = (
        (semconv.LATENCY_QUEUE, semconv.SPAN_QUEUE),
        (semconv.LATENCY_PREFILL, semconv.SPAN_PREFILL),
        (semconv.LATENCY_DECODE, semconv.SPAN_DECODE),
    )
    attributes: dict[str, Value] = {semconv.LATENCY_E2E: record.duration_ns / 1e9}
    if record.ttft_ns:
        attributes[semconv.LATENCY_TTFT] = record.ttft_ns / 1e9
    for key, name in pairs:
        stage = record.stage(name)
        if stage is not None:
            attributes[key] = (stage.ended_at - stage.started_at) / 1e9
    return attributes
