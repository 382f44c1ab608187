"""Propagates a request to another process: its headers and its state there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import context, propagation, request_span, start
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()
    propagation._fragments.clear()


@pytest.fixture
def request_(recording: Recording) -> request_span.RequestSpan:
    request = start.open_request("POST /", owner="test")
    assert request is not None
    return request


@pytest.fixture(autouse=True)
def empty_context() -> Iterator[None]:
    """Leaves no request in the context of the thread."""
    yield
    context.attach(Context())


def test_events_of_a_fragment_belong_to_its_request(
    recording: Recording, request_: request_span.RequestSpan
) -> None:
    fragment = propagation.join_request(propagation.inject(request_))
    assert fragment is not None
    fragment.record_event(events.EngineFinished(_clock.now(), "stop", 3))
    propagation.release(fragment)
    request_.close()
    (record,) = recording.records()
    assert (record.finish_reasons, record.output_tokens) == (("stop",), 3)
    assert recording.in_flight == 0


def test_traceparent_matches_the_request_header(request_: request_span.RequestSpan) -> None:
    headers = propagation.inject(request_)
    assert headers["traceparent"].split("-")[1:3] == [
        headers[propagation.REQUEST_HEADER][:32],
        headers[propagation.REQUEST_HEADER][32:],
    ]


def test_without_other_readers_only_the_request_header_is_sent(request_: request_span.RequestSpan) -> None:
    headers = propagation.inject(request_)
    assert propagation.inject(request_, has_readers=False) == {
        propagation.REQUEST_HEADER: headers[propagation.REQUEST_HEADER]
    }


@pytest.mark.parametrize(("is_named", "has_forward_name"), [(False, False), (True, False), (False, True)])
def test_a_part_in_another_process_knows_whether_its_request_has_a_name(
    request_: request_span.RequestSpan, is_named: bool, has_forward_name: bool
) -> None:
    request_.is_named, request_.has_forward_name = is_named, has_forward_name
    joined = propagation.join_as_span(propagation.inject(request_))
    assert joined is not None
    assert (joined.is_named, joined.has_forward_name) == (is_named, has_forward_name)
    assert propagation.join_request(propagation.inject(request_)) is not None


def test_sequences_share_one_fragment_until_the_last_release(
    request_: request_span.RequestSpan,
) -> None:
    headers = propagation.inject(request_)
    first, second = propagation.join_request(headers), propagation.join_request(headers)
    assert first is second is not None
    propagation.release(first)
    assert propagation._fragments != {}
    propagation.release(first)
    assert propagation._fragments == {}
    again = propagation.join_request(headers)
    assert again is not None and again is not first


@pytest.mark.parametrize("header", ["", "ab", "x" * 48, "é" * 48, "00" * 23])
def test_invalid_header_joins_no_request(recording: Recording, header: str) -> None:
    assert propagation.join_request({propagation.REQUEST_HEADER: header}) is None
    assert propagation.join_request({}) is None
    assert propagation.join_request(None) is None


def test_fragment_without_a_slot_records_nothing(request_: request_span.RequestSpan) -> None:
    fragment = propagation.RequestFragment(0, b"x" * 8, 0)
    fragment.record_event(events.RequestReceived(_clock.now()))
    assert fragment.packed == bytes(4)


# ── without the propagators ──────────────────────────────────────────────────────────────────────────────────────────

PARENTS = [
    SpanContext(1, 2, True, TraceFlags(0)),
    SpanContext(1, 2, True, TraceFlags(1)),
    SpanContext(1, 2, True, TraceFlags(1), TraceState([("vendor", "x")])),
    SpanContext(1, 2, True, TraceFlags(3)),
]


def open_below(parent: SpanContext) -> request_span.RequestSpan:
    """Opens a request below this span, and makes it current."""
    around = trace.set_span_in_context(NonRecordingSpan(parent), Context())
    request = start.open_request("POST /", owner="test", around=around)
    assert request is not None
    request.attach()
    return request


@pytest.mark.parametrize("parent", PARENTS, ids=["not_sampled", "sampled", "with_state", "other_flag"])
@pytest.mark.parametrize("has_baggage", [False, True], ids=["", "with_baggage"])
def test_headers_and_context_are_those_of_the_propagators(
    recording: Recording, parent: SpanContext, has_baggage: bool
) -> None:
    open_below(parent)
    if has_baggage:
        context.attach(baggage.set_baggage("user", "x"))
    request = start.current_request()
    assert request is not None
    expected: dict[str, str] = {}
    propagate.inject(expected)
    headers = propagation.inject(request)
    assert {name: text for name, text in headers.items() if name != propagation.REQUEST_HEADER} == expected
    joined = propagation.join_as_span(headers)
    assert joined is not None
    read = propagate.extract(expected, Context())
    assert context.span_context(joined.around) == context.span_context(read)
    assert baggage.get_all(joined.around) == baggage.get_all(read)


class RenamedPropagator(TraceContextTextMapPropagator):
    """Writes another header than the W3C propagator."""

    _TRACEPARENT_HEADER_NAME = "renamed"


def test_other_propagators_are_called(recording: Recording) -> None:
    known = propagate.get_global_textmap()
    propagate.set_global_textmap(RenamedPropagator())
    try:
        headers = propagation.inject(open_below(PARENTS[1]))
        joined = propagation.join_as_span(headers)
    finally:
        propagate.set_global_textmap(known)
    assert headers.keys() == {"renamed", propagation.REQUEST_HEADER}
    assert joined is not None and context.span_context(joined.around).trace_id == 1


@pytest.mark.parametrize("text", ["", "01", "00-1-2-01", "x"])
def test_a_damaged_traceparent_joins_the_request_without_a_span(
    request_: request_span.RequestSpan, text: str
) -> None:
    joined = propagation.join_as_span({**propagation.inject(request_), "traceparent": text})
    assert joined is not None and joined.ids[:2] == request_.ids[:2]
