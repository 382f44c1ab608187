"""The live request: what it makes of several reports of its end, and whether anything can hang from its span."""

from __future__ import annotations

import weakref
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.span_ids import ProviderSpanFactory
from tests.support.rings import Recording

ABOVE = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1))


def opened() -> request_span.RequestSpan:
    """A request below a span of somebody else in this process."""
    with trace.use_span(NonRecordingSpan(ABOVE)):
        request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    return request


def only(recording: Recording) -> RequestRecord:
    (record,) = recording.records()
    return record


def test_how_many_tokens_a_client_asks_for_is_any_number(recording: Recording) -> None:
    request = opened()
    request.record_submitted("toy", 1, 5, -1)
    request.close()
    assert only(recording).max_tokens == 0
    request = opened()
    request.record_submitted("toy", 1, 5, 10**10)
    request.close()
    assert only(recording).max_tokens == 2**32 - 1


def test_a_request_that_is_over_keeps_nobody_who_was_there_before_it(recording: Recording) -> None:
    """The reader of a connection may keep the context of a request, and the next one on it begins there."""
    first = opened()
    token = first.attach()
    second = opened()
    start.detach(token)
    first.close()
    second.close()
    kept = weakref.ref(first)
    recording.records()
    del first
    assert kept() is None
    assert not second.is_recording()


def test_a_thousand_inputs_of_one_request_say_once_what_it_is(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    request = opened()
    monkeypatch.setattr(RequestSpan, "record_event", lambda request, fact: said.append(fact))
    monkeypatch.setattr(
        RequestSpan, "record_attribute", lambda request, key, value: said.append((key, value))
    )
    for _ in range(1000):
        request.set_operation("embeddings", "vllm", "bert")
        request.set_request_id("embd-1")
    request.set_operation("embeddings", "vllm", "bert-lora")
    assert [value for _, value in said] == [
        "embeddings",
        "vllm",
        "bert",
        "embd-1",
        "embeddings",
        "vllm",
        "bert-lora",
    ]


def test_what_is_no_attribute_is_ignored_and_the_request_is_told(recording: Recording) -> None:
    request = opened()
    span: Any = request
    for key in (("a", "b"), 3, "", None):
        span.set_attribute(key, 1)
        span.add_event("odd", {key: 1})
    span.set_attribute("good", 1)
    span.update_name(7)
    request.close()
    record = only(recording)
    assert record.attributes == {"good": 1}
    assert [event.attributes for event in record.events] == [{}] * 4


@pytest.mark.parametrize("timestamp", [np.int64(1), np.int64(1 << 62), 1.5, "now", datetime.now(), -5])
def test_an_event_happens_while_its_request_is_there_whatever_its_time_is_said_to_be(
    recording: Recording, timestamp: Any
) -> None:
    request = opened()
    request.add_event("e", timestamp=timestamp)
    request.close()
    record = only(recording)
    (event,) = record.events
    assert type(event.at) is int
    assert record.arrived_at <= event.at <= record.ended_at


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((events.OK, ""), (events.ERROR, "MemoryError")),
        ((events.ERROR, "503"), (events.ERROR, "MemoryError")),
        ((events.ABORTED, "timeout"), (events.ABORTED, "timeout")),
    ],
)
def test_what_the_engine_failed_of_goes_before_what_the_server_made_of_it(
    recording: Recording, said: tuple[int, str], expected: tuple[int, str]
) -> None:
    request = opened()
    request.set_engine_error("MemoryError")
    request.set_engine_error("RuntimeError")
    request.close(*said)
    record = only(recording)
    assert (record.outcome, record.error_type) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((StatusCode.ERROR,), (events.ERROR, "_OTHER")),
        ((StatusCode.ERROR, StatusCode.OK), (events.OK, "")),
        ((StatusCode.UNSET,), (events.OK, "")),
    ],
)
def test_the_status_that_user_code_set_last_counts(
    recording: Recording, codes: tuple[StatusCode, ...], expected: tuple[int, str]
) -> None:
    request = opened()
    for code in codes:
        request.set_status(code)
    request.close()
    record = only(recording)
    assert (record.outcome, record.error_type) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (StatusCode.ERROR, (events.ERROR, "_OTHER")),
        (StatusCode.UNSET, (events.OK, "")),
        (StatusCode.OK, (events.OK, "")),
    ],
)
def test_the_status_that_user_code_set_on_a_providers_span_counts_as_well(
    recording: Recording, code: StatusCode, expected: tuple[int, str]
) -> None:
    request_span.span_factory = ProviderSpanFactory(TracerProvider(shutdown_on_exit=False).get_tracer("test"))
    request = opened()
    token = request.attach()
    trace.get_current_span().set_status(code)
    start.detach(token)
    request.close()
    record = only(recording)
    assert (record.outcome, record.error_type) == expected


def test_a_providers_span_that_records_nothing_has_no_status(recording: Recording) -> None:
    request_span.span_factory = ProviderSpanFactory(trace.NoOpTracerProvider().get_tracer("test"))
    request = opened()
    request.close()
    assert only(recording).outcome == events.OK


def test_the_limit_of_attributes_is_of_how_many_there_are_and_not_of_how_often_they_are_set(
    recording: Recording,
) -> None:
    request = opened()
    for number in range(200):
        request.set_attribute("progress", number)
    for number in range(200):
        request.set_attribute(f"part {number}", number)
    request.set_attribute("progress", "done")
    request.close()
    parts = {f"part {number}": number for number in range(127)}
    assert only(recording).attributes == {"progress": "done", **parts}


def test_a_link_has_the_attributes_that_it_was_added_with(recording: Recording) -> None:
    request = opened()
    for attributes in ({"kind": "retry", 7: "no key"}, None, {"text": "x" * 9000}, {"kind": "again"}):
        request.add_link(ABOVE, attributes)
    request.close()
    links = only(recording).links
    assert {(link.trace_id, link.span_id) for link in links} == {(bytes(15) + b"\1", bytes(7) + b"\2")}
    # What has no room in the ring is left out.
    assert [link.attributes for link in links] == [{"kind": "retry"}, {}, {}, {"kind": "again"}]


def test_a_status_says_less_than_what_was_raised(recording: Recording) -> None:
    request = opened()
    request.set_status(StatusCode.ERROR)
    request.close(events.ERROR, "ValueError")
    assert only(recording).error_type == "ValueError"


def test_whoever_asks_after_the_end_of_a_request_that_nobody_asked_is_told_of_the_span_above(
    recording: Recording,
) -> None:
    request = opened()
    request.close()
    assert request.get_span_context() == ABOVE
    assert only(recording).redundant


def test_a_span_whose_id_somebody_was_told_keeps_it(recording: Recording) -> None:
    request = opened()
    told = request.get_span_context()
    request._use_parent_context()  # as if it had been asked in the midst of its end
    request.close()
    assert request.get_span_context() == told != ABOVE
    assert not only(recording).redundant


def test_a_request_that_is_somebodys_root_stays(recording: Recording) -> None:
    request = start.open_request("POST", owner="asgi")
    assert request is not None
    request.close()
    assert not only(recording).redundant
