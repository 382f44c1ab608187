"""The spans of one request, as `docs/read-a-trace.md` draws them: server, request, stages, prefill steps.

Decode steps are not here: there are too many to be objects, `sinks.spans` writes them from columns, without what is the
same in all spans of a request (its `tracestate`). Span ids below the request are derived from its id, so that sending
again sends the same spans.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from types import MappingProxyType

from otel_infer import semconv
from otel_infer.assembly.records.request import PrefillStep, RequestRecord, Stage
from otel_infer.export.otlp import Event, Link, Recurring, Span
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import attributes as said
from otel_infer.ringbuffer.events import ABORTED, ERROR, Value

SERVER, INTERNAL = 2, 1
STATUS_UNSET, STATUS_ERROR = 0, 2
_HTTP = "HTTP"
"""The word of the conventions for a method that is not known."""
_ON_HOST_CLOCK, _NOTHING = Recurring({semconv.CLOCK: semconv.CLOCK_HOST}), Recurring()
_NONE: Mapping[str, float] = MappingProxyType({})


_ID, _ZERO = struct.Struct("8s"), bytes(8)


def derived_ids(span_id: bytes, of: str, count: int) -> list[bytes]:
    """Ids of so many spans below the one with this id, by what they are and their order; never zero."""
    digest = hashlib.shake_128(of.encode() + span_id).digest(8 * count)
    ids = [one for (one,) in _ID.iter_unpack(digest)]
    return ids if _ZERO not in digest else [b"\1" * 8 if one == _ZERO else one for one in ids]


def spans_of(
    record: RequestRecord, decision: tail_sampler.Decision, latency_attributes: bool = False
) -> list[Span]:
    """Server span (if it is ours), request span and stage spans, in this order; of a request that reached no engine the
    server span alone, which is then the live one and has what user code said of it."""
    own, http = said.own_and_http(record)
    if is_server_only(record):
        name = record.span_name or server_name(record)
        return [_request(record, decision, record.parent_span_id, name, SERVER, {**own, **http}, {})]
    spans, parent = [], record.parent_span_id
    if record.server_span_id:
        spans.append(_server(record, http))
        parent, http = record.server_span_id, {}
    name = record.span_name or request_name(record)
    latency = said.latency(record) if latency_attributes else {}
    spans.append(_request(record, decision, parent, name, INTERNAL, {**own, **http}, latency))
    return spans + _stages(record, decision)


def _server(record: RequestRecord, http: dict[str, Value]) -> Span:
    if record.error_type:
        http = {**http, semconv.ERROR_TYPE: record.error_type}
    offset, name = record.wall_offset, server_name(record)
    times = record.arrived_at + offset, record.ended_at + offset
    return Span(
        record.trace_id, record.server_span_id, record.parent_span_id, name, SERVER, *times, http,
        status=_status(record), trace_state=record.tracestate,
    )  # fmt: skip


def _request(
    record: RequestRecord,
    decision: tail_sampler.Decision,
    parent: bytes,
    name: str,
    kind: int,
    own: dict[str, Value],
    latency: dict[str, float],
) -> Span:
    """The live span. What we say goes before what user code said of the same name."""
    words = said.words(record, decision)
    lengths = said.lengths(record)
    if latency:
        lengths.update(latency)
    if own:
        own = {key: value for key, value in own.items() if key not in words and key not in lengths}
    own.update(said.counts(record, decision))
    offset = record.wall_offset
    return Span(
        record.trace_id, record.span_id, parent, name, kind, record.arrived_at + offset, record.ended_at + offset,
        own, _events(record, decision), _links(record), _status(record), record.tracestate,
        lengths=lengths, recurring=words,
    )  # fmt: skip


def _status(record: RequestRecord) -> int:
    failed = record.outcome == ERROR or (
        record.outcome == ABORTED and record.error_type not in semconv.NOT_ERRORS
    )
    return STATUS_ERROR if failed else STATUS_UNSET


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


def _events(record: RequestRecord, decision: tail_sampler.Decision) -> list[Event]:
    """Those that were added to the live span, and the pauses if the request is kept."""
    events = [Event(event.at + record.wall_offset, event.name, event.attributes) for event in record.events]
    if said.is_kept(decision) and (record.pauses or record.loop_pauses or record.marks):
        events = sorted([*events, *_pauses(record), *_marks(record)], key=lambda event: event.at)
    return events


def _links(record: RequestRecord) -> list[Link]:
    """Those that were added to the live span, to the start of the process, and to who interfered most."""
    links = [Link(*record.start)] if record.start is not None else []
    links += [Link(*link) for link in record.links]
    offender = record.blame.offender if record.blame is not None else None
    if offender is not None:
        delay: dict[str, Value] = {
            semconv.OFFENDER_DELAY: offender.length / 1e9,
            semconv.OFFENDER_CLASS: offender.named,
        }
        links.append(Link(offender.trace_id, offender.span_id, delay))
    return links


def _pauses(record: RequestRecord) -> list[Event]:
    """Of each pause the part in which the request was there."""
    held_up = [
        (max(pause.started_at, record.arrived_at), min(pause.ended_at, record.ended_at), pause.cause)
        for pause in record.all_pauses
    ]
    longest = sorted(held_up, key=lambda pause: pause[0] - pause[1])[: said.MOST_PAUSES]
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
        for mark in record.marks[-said.MOST_PAUSES :]
    ]


def _stages(record: RequestRecord, decision: tail_sampler.Decision) -> list[Span]:
    """User code may say a stage of one name several times: what is told of all decode steps stands on the first `decode`."""
    spans = []
    decode = record.stage(semconv.SPAN_DECODE)
    chunks = _chunks(record) if decision.prefill_steps else {}
    ids = derived_ids(record.span_id, "stage", len(record.stages))
    for number, (span_id, stage) in enumerate(zip(ids, record.stages)):
        attributes, lengths = stage.attributes, _NONE
        if stage is decode:
            attributes = {**attributes, **said.decode_counts(record, decision.steps)}
            lengths = said.decode_lengths(record)
        spans.append(_below(record, span_id, record.span_id, stage, attributes, lengths))
        spans += [_prefill_step(record, span_id, *chunk) for chunk in chunks.get(number, ())]
    return spans


def _chunks(record: RequestRecord) -> dict[int, list[tuple[bytes, PrefillStep]]]:
    """Span ids and prefill steps, by the number of the stage they are below: the prefill around them, or else the first."""
    stages, chunks = record.stages, record.prefill_steps
    prefills = [number for number, stage in enumerate(stages) if stage.name == semconv.SPAN_PREFILL]
    below: dict[int, list[tuple[bytes, PrefillStep]]] = {number: [] for number in prefills}
    if not prefills:
        return below
    for span_id, chunk in zip(derived_ids(record.span_id, semconv.SPAN_PREFILL_STEP, len(chunks)), chunks):
        around = [
            number
            for number in prefills
            if stages[number].started_at <= chunk.started_at and chunk.ended_at <= stages[number].ended_at
        ]
        below[(around or prefills)[0]].append((span_id, chunk))
    return below


def _prefill_step(record: RequestRecord, parent: bytes, span_id: bytes, chunk: PrefillStep) -> Span:
    attributes: dict[str, Value] = {
        semconv.STEP_ID: chunk.step,
        semconv.STEP_TOKENS: chunk.tokens,
        semconv.BATCH_SIZE: chunk.batch_size,
    }
    stage = Stage(semconv.SPAN_PREFILL_STEP, chunk.started_at, chunk.ended_at, attributes)
    return _below(record, span_id, parent, stage, attributes, _NONE)


def _below(
    record: RequestRecord,
    span_id: bytes,
    parent: bytes,
    stage: Stage,
    attributes: dict[str, Value],
    lengths: Mapping[str, float],
) -> Span:
    name, started_at, ended_at, _ = stage
    offset = record.wall_offset
    return Span(
        record.trace_id, span_id, parent, name, INTERNAL, started_at + offset, ended_at + offset, attributes,
        (), (), STATUS_UNSET, record.tracestate, 0, lengths,
        _ON_HOST_CLOCK if name in semconv.DEVICE_STAGES else _NOTHING,
    )  # fmt: skip
