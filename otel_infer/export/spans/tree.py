"""Builds the spans of one request, as in `docs/read-a-trace.md`: server, request, stages, prefill steps.

Decode steps are not built here, because they are too many to be objects. `export.spans.exporter` encodes them
from columns, without the `tracestate` that all spans of a request share. Span ids below the request are
derived from its id, so that a resend sends the same spans.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from otel_infer import semconv
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import PrefillStep, RequestRecord, Stage
from otel_infer.export.otlp import SharedAttributes, Span, SpanEvent, SpanLink
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import attributes as span_attributes
from otel_infer.ringbuffer.events import ABORTED, ERROR, CodeLocated, Value, make_tuple

INTERNAL, SERVER, CONSUMER = 1, 2, 5
STATUS_UNSET, STATUS_ERROR = 0, 2
_EDGE_STAGES = frozenset(
    (semconv.SPAN_ACCEPT, *semconv.WAIT_STAGES, semconv.SPAN_INGRESS, semconv.SPAN_POSTPROCESS)
)
_UNKNOWN_METHOD = "HTTP"
"""Name of an unknown HTTP method in the conventions."""
_HOST_CLOCK, _NO_SHARED = SharedAttributes({semconv.CLOCK: semconv.CLOCK_HOST}), SharedAttributes()
_NO_DURATIONS: Mapping[str, float] = MappingProxyType({})
_NO_ATTRIBUTES: Mapping[str, Value] = MappingProxyType({})


_ID_STRUCT, _ZERO_ID = struct.Struct("8s"), bytes(8)


def derive_span_ids(span_id: bytes, kind: str, count: int) -> list[bytes]:
    """Returns `count` span ids below the span with this id, by their kind and order; never zero."""
    digest = hashlib.shake_128(kind.encode() + span_id).digest(8 * count)
    ids = [derived for (derived,) in _ID_STRUCT.iter_unpack(digest)]
    return (
        ids if _ZERO_ID not in digest else [b"\1" * 8 if derived == _ZERO_ID else derived for derived in ids]
    )


def build_request_spans(
    record: RequestRecord, decision: tail_sampler.Decision, latency_attributes: bool = False
) -> list[Span]:
    """Returns the server span (if it is ours), the request span and the stage spans, in this order.

    A request that inferred nothing has no request span. The server span is then the live span, with the
    attributes of user code. Stages are below it if work was recorded: it was tokenized before it was refused.
    """
    own, http = span_attributes.split_attributes(record)
    if is_server_only(record):
        name = record.span_name or server_name(record)
        server = _build_request_span(
            record, decision, record.parent_span_id, name, _server_kind(http), {**own, **http}, {}
        )
        return [server, *_build_stage_spans(record, decision)] if has_stage_spans(record) else [server]
    spans, parent = [], record.parent_span_id
    if record.server_span_id:
        spans.append(_build_server_span(record, http))
        parent = record.server_span_id
    else:
        own = {**own, **http}
    name = record.span_name or request_name(record)
    latency = span_attributes.vllm_attributes(record) if latency_attributes else {}
    spans.append(_build_request_span(record, decision, parent, name, INTERNAL, own, latency))
    return spans + _build_stage_spans(record, decision)


def _build_server_span(record: RequestRecord, http: SharedAttributes) -> Span:
    if record.error_type:
        http = SharedAttributes({**http, semconv.ERROR_TYPE: record.error_type})
    offset = record.wall_offset
    fields = (
        record.trace_id, record.server_span_id, record.parent_span_id, server_name(record), _server_kind(http),
        record.arrived_at + offset, record.ended_at + offset, _NO_ATTRIBUTES, (), (),
        _status_of_request(record), record.tracestate, 0, _NO_DURATIONS, http,
    )  # fmt: skip
    return make_tuple(Span, fields)  # type: ignore[no-any-return]


def _server_kind(http: Mapping[str, Value]) -> int:
    """Returns the kind of the span above a request: a job that is processed has a consumer span."""
    return CONSUMER if semconv.MESSAGING_OPERATION_TYPE in http else SERVER


def _build_request_span(
    record: RequestRecord,
    decision: tail_sampler.Decision,
    parent: bytes,
    name: str,
    kind: int,
    own: Mapping[str, Value],
    latency: dict[str, float],
) -> Span:
    """Returns the live span. Recorded attributes override attributes of user code with the same name."""
    strings = span_attributes.string_attributes(record, decision)
    durations = span_attributes.duration_attributes(record)
    if latency:
        durations.update(latency)
    attributes = span_attributes.count_attributes(record, decision)
    if own:
        own = {key: value for key, value in own.items() if key not in strings and key not in durations}
        attributes = {**own, **attributes}
    offset = record.wall_offset
    fields = (
        record.trace_id, record.span_id, parent, name, kind, record.arrived_at + offset, record.ended_at + offset,
        attributes, _build_events(record, decision), _build_links(record), _status_of_request(record),
        record.tracestate, 0, durations, strings,
    )  # fmt: skip
    return make_tuple(Span, fields)  # type: ignore[no-any-return]


def _status_of_request(record: RequestRecord) -> int:
    failed = record.outcome == ERROR or (
        record.outcome == ABORTED and record.error_type not in semconv.NON_ERROR_TYPES
    )
    return STATUS_ERROR if failed else STATUS_UNSET


def is_server_only(record: RequestRecord) -> bool:
    """Returns whether the request span is the server span."""
    return record.server_span_id == record.span_id


def has_stage_spans(record: RequestRecord) -> bool:
    """Returns whether the stages are spans: of an inference, or where work was recorded."""
    return not is_server_only(record) or any(stage.name not in _EDGE_STAGES for stage in record.stages)


def request_name(record: RequestRecord) -> str:
    """Returns `chat llama-3-8b`, `inference`, …; method and route for a request that reached no engine."""
    if not record.operation:
        return server_name(record)
    return f"{record.operation} {record.model}" if record.model else record.operation


def server_name(record: RequestRecord) -> str:
    """Returns method and route, or only the method if the route is unknown."""
    route = record.attributes.get(semconv.HTTP_ROUTE)
    method = record.attributes.get(semconv.HTTP_REQUEST_METHOD) or record.name
    method_name = _UNKNOWN_METHOD if method == semconv.OTHER else method
    return f"{method_name} {route}" if route else str(method_name)


def _build_events(record: RequestRecord, decision: tail_sampler.Decision) -> list[SpanEvent]:
    """Returns the events of the live span. A request with a keep reason also gets its pauses and marks."""
    if not (record.events or record.pauses or record.loop_pauses or record.marks or record.code_samples):
        return []
    events = [
        SpanEvent(event.at + record.wall_offset, event.name, event.attributes) for event in record.events
    ]
    if span_attributes.has_sampling_reason(decision):
        instants = record.arrived_at, record.ended_at, record.wall_offset
        events += build_pause_events(record.all_pauses, *instants, record.code_samples)
        events += _build_mark_events(record)
        events.sort(key=lambda event: event.at)
    return events


def _build_links(record: RequestRecord) -> list[SpanLink]:
    """Returns links to the process start, of the live span, and to the request that interfered most."""
    links = [SpanLink(*record.start_ids)] if record.start_ids is not None else []
    if record.links:
        links += [SpanLink(*link) for link in record.links]
    interferer = record.breakdown.interferer if record.breakdown is not None else None
    if interferer is not None:
        delay: dict[str, Value] = {
            semconv.INTERFERENCE_DELAY: interferer.length / 1e9,
            semconv.INTERFERENCE_CLASS: interferer.traffic_class,
        }
        links.append(SpanLink(interferer.trace_id, interferer.span_id, delay))
    return links


def build_pause_events(
    pauses: Sequence[Pause], begin: int, end: int, wall_offset: int, samples: Sequence[CodeLocated] = ()
) -> list[SpanEvent]:
    """Returns events for the longest pauses, each limited to the time of the request, longest first.

    A pause of an event loop has the code that was sampled in it. Other samples are events of their own.
    """
    limited = [(max(pause.started_at, begin), min(pause.ended_at, end), pause.cause) for pause in pauses]
    longest = sorted(limited, key=lambda pause: pause[0] - pause[1])[: span_attributes.MAX_PAUSES]
    in_loop = [sample for sample in samples if sample.reason == semconv.LATE_EVENT_LOOP]
    built = [
        _build_pause_event(since, until, cause, wall_offset, _find_sample(in_loop, since, until, cause))
        for since, until, cause in longest
    ]
    others = [sample for sample in samples if sample.reason != semconv.LATE_EVENT_LOOP]
    return built + [
        _build_pause_event(max(sample.since, begin), min(sample.at, end), sample.reason, wall_offset, sample)
        for sample in others[: span_attributes.MAX_PAUSES]
    ]


def _find_sample(samples: Sequence[CodeLocated], since: int, until: int, cause: str) -> CodeLocated | None:
    if cause not in semconv.EVENT_LOOP_CAUSES:
        return None
    return next((sample for sample in samples if sample.since < until and sample.at > since), None)


def _build_pause_event(
    since: int, until: int, cause: str, wall_offset: int, sample: CodeLocated | None
) -> SpanEvent:
    attributes: dict[str, Value] = {semconv.PAUSE_CAUSE: cause, semconv.PAUSE_DURATION: (until - since) / 1e9}
    if sample is not None:
        attributes |= {
            semconv.CODE_FUNCTION: sample.function,
            semconv.CODE_FILE: sample.file,
            semconv.CODE_LINE: sample.line,
        }
        if sample.waiter:
            attributes[semconv.CODE_WAITER] = sample.waiter
    return SpanEvent(since + wall_offset, semconv.EVENT_PAUSE, attributes)


def _build_mark_events(record: RequestRecord) -> list[SpanEvent]:
    return [
        SpanEvent(
            min(mark.at, record.ended_at) + record.wall_offset,
            semconv.EVENT_MARK,
            {
                semconv.MARK_NAME: mark.name,
                semconv.MARK_COUNT: mark.times,
                semconv.MARK_WINDOW: (mark.at - mark.since) / 1e9,
            },
        )
        for mark in record.marks[-span_attributes.MAX_PAUSES :]
    ]


def _build_stage_spans(record: RequestRecord, decision: tail_sampler.Decision) -> list[Span]:
    """Returns stage spans.

    User code may record several stages of one name, so step attributes are on the first `decode`.
    """
    spans: list[Span] = []
    decode = record.find_stage(semconv.SPAN_DECODE)
    chunks = _group_prefill_steps(record) if decision.prefill_steps else {}
    parent = record.span_id
    ids = derive_span_ids(parent, "stage", len(record.stages))
    for number, (span_id, stage) in enumerate(zip(ids, record.stages)):
        attributes, durations = stage.attributes, _NO_DURATIONS
        if stage is decode:
            attributes = {**attributes, **span_attributes.step_count_attributes(record, decision.steps)}
            durations = span_attributes.step_duration_attributes(record)
        spans.append(_build_child_span(record, span_id, parent, stage, attributes, durations))
        if chunks:
            spans += [_build_prefill_span(record, span_id, *chunk) for chunk in chunks.get(number, ())]
    return spans


def _group_prefill_steps(record: RequestRecord) -> dict[int, list[tuple[bytes, PrefillStep]]]:
    """Returns span ids and prefill steps by the number of their parent stage.

    The parent is the prefill around the step, or else the first prefill.
    """
    stages, chunks = record.stages, record.prefill_steps
    prefills = [number for number, stage in enumerate(stages) if stage.name == semconv.SPAN_PREFILL]
    by_stage: dict[int, list[tuple[bytes, PrefillStep]]] = {number: [] for number in prefills}
    if not prefills:
        return by_stage
    for span_id, chunk in zip(
        derive_span_ids(record.span_id, semconv.SPAN_PREFILL_STEP, len(chunks)), chunks
    ):
        enclosing = [
            number
            for number in prefills
            if stages[number].started_at <= chunk.started_at and chunk.ended_at <= stages[number].ended_at
        ]
        by_stage[(enclosing or prefills)[0]].append((span_id, chunk))
    return by_stage


def _build_prefill_span(record: RequestRecord, parent: bytes, span_id: bytes, chunk: PrefillStep) -> Span:
    attributes: dict[str, Value] = {
        semconv.STEP_ID: chunk.step,
        semconv.STEP_TOKENS: chunk.tokens,
        semconv.BATCH_SIZE: chunk.batch_size,
    }
    stage = Stage(semconv.SPAN_PREFILL_STEP, chunk.started_at, chunk.ended_at, attributes)
    return _build_child_span(record, span_id, parent, stage, attributes, _NO_DURATIONS)


def _build_child_span(
    record: RequestRecord,
    span_id: bytes,
    parent: bytes,
    stage: Stage,
    attributes: dict[str, Value],
    durations: Mapping[str, float],
) -> Span:
    name, started_at, ended_at, _ = stage
    offset = record.wall_offset
    fields = (
        record.trace_id, span_id, parent, name, INTERNAL, started_at + offset, ended_at + offset, attributes,
        (), (), STATUS_UNSET, record.tracestate, 0, durations,
        _HOST_CLOCK if name in semconv.DEVICE_STAGES else _NO_SHARED,
    )  # fmt: skip
    return make_tuple(Span, fields)  # type: ignore[no-any-return]
