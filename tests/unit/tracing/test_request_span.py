"""The live request span: several reports of its end, and whether it can be a parent."""

from __future__ import annotations

import weakref
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from otel_infer.tracing.span_ids import ProviderSpanFactory
from tests.support.rings import Recording

PARENT = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1))


def open_below_parent() -> request_span.RequestSpan:
    """Opens a request below a span of another library in this process."""
    with trace.use_span(NonRecordingSpan(PARENT)):
        request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    return request


def read_single_record(recording: Recording) -> RequestRecord:
    (record,) = recording.records()
    return record


def test_requested_max_tokens_is_clamped(recording: Recording) -> None:
    request = open_below_parent()
    request.record_submitted("toy", 1, 5, -1)
    request.close()
    assert read_single_record(recording).max_tokens == 0
    request = open_below_parent()
    request.record_submitted("toy", 1, 5, 10**10)
    request.close()
    assert read_single_record(recording).max_tokens == 2**32 - 1


def test_ended_request_holds_no_reference_to_the_previous(recording: Recording) -> None:
    """The reader of a connection may hold the context of a request, in which the next request begins."""
    first = open_below_parent()
    token = first.attach()
    second = open_below_parent()
    detach(token)
    first.close()
    second.close()
    reference = weakref.ref(first)
    recording.records()
    del first
    assert reference() is None
    assert not second.is_recording()


def test_repeated_attributes_are_recorded_once(recording: Recording) -> None:
    request = open_below_parent()
    for _ in range(1000):
        request.set_operation("embeddings", "vllm", "bert")
        request.set_request_id("embd-1")
    request.set_operation("embeddings", "vllm", "bert-lora")
    kinds = events.OperationNamed, events.AttributeSet
    assert [event[1:] for event in recording.events() if isinstance(event, kinds)] == [
        ("embeddings", "vllm", "bert"),
        (semconv.REQUEST_ID, "embd-1"),
        ("embeddings", "vllm", "bert-lora"),
    ]


def test_a_long_model_name_is_recorded_whole(recording: Recording) -> None:
    request = open_below_parent()
    request.set_operation("chat", "vllm", "m" * 200)
    request.close()
    (record,) = recording.records()
    assert record.model == "m" * 200 and record.operation == "chat"


def test_invalid_attributes_are_ignored(recording: Recording) -> None:
    request = open_below_parent()
    span: Any = request
    for key in (("a", "b"), 3, "", None):
        span.set_attribute(key, 1)
        span.add_event("odd", {key: 1})
    span.set_attribute("good", 1)
    span.update_name(7)
    request.close()
    record = read_single_record(recording)
    assert record.attributes == {"good": 1}
    assert [event.attributes for event in record.events] == [{}] * 4


@pytest.mark.parametrize("timestamp", [np.int64(1), np.int64(1 << 62), 1.5, "now", datetime.now(), -5])
def test_event_time_is_clamped_to_the_request(recording: Recording, timestamp: Any) -> None:
    request = open_below_parent()
    request.add_event("e", timestamp=timestamp)
    request.close()
    record = read_single_record(recording)
    (event,) = record.events
    assert type(event.at) is int
    assert record.arrived_at <= event.at <= record.ended_at


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ((events.OK, ""), (events.ERROR, "MemoryError")),
        ((events.ERROR, "503"), (events.ERROR, "MemoryError")),
        ((events.ABORTED, "timeout"), (events.ABORTED, "timeout")),
    ],
)
def test_engine_error_overrides_server_outcome_except_abort(
    recording: Recording, reported: tuple[int, str], expected: tuple[int, str]
) -> None:
    request = open_below_parent()
    request.set_engine_error("MemoryError")
    request.set_engine_error("RuntimeError")
    request.close(*reported)
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((StatusCode.ERROR,), (events.ERROR, "_OTHER")),
        ((StatusCode.ERROR, StatusCode.OK), (events.OK, "")),
        ((StatusCode.OK, StatusCode.ERROR), (events.OK, "")),
        ((StatusCode.UNSET,), (events.OK, "")),
    ],
)
def test_ok_status_set_by_user_code_is_final(
    recording: Recording, codes: tuple[StatusCode, ...], expected: tuple[int, str]
) -> None:
    request = open_below_parent()
    for code in codes:
        request.set_status(code)
    request.close()
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (StatusCode.ERROR, (events.ERROR, "_OTHER")),
        (StatusCode.UNSET, (events.OK, "")),
        (StatusCode.OK, (events.OK, "")),
    ],
)
def test_status_set_on_provider_span_counts(
    recording: Recording, code: StatusCode, expected: tuple[int, str]
) -> None:
    request_span.span_factory = ProviderSpanFactory(TracerProvider(shutdown_on_exit=False).get_tracer("test"))
    request = open_below_parent()
    token = request.attach()
    trace.get_current_span().set_status(code)
    detach(token)
    request.close()
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == expected


def test_non_recording_provider_span_has_no_status(recording: Recording) -> None:
    request_span.span_factory = ProviderSpanFactory(trace.NoOpTracerProvider().get_tracer("test"))
    request = open_below_parent()
    request.close()
    assert read_single_record(recording).outcome == events.OK


def test_attribute_limit_counts_distinct_keys(
    recording: Recording,
) -> None:
    request = open_below_parent()
    for number in range(200):
        request.set_attribute("progress", number)
    for number in range(200):
        request.set_attribute(f"part {number}", number)
    request.set_attribute("progress", "done")
    request.close()
    parts = {f"part {number}": number for number in range(127)}
    assert read_single_record(recording).attributes == {"progress": "done", **parts}


def test_link_has_its_attributes(recording: Recording) -> None:
    request = open_below_parent()
    for attributes in ({"kind": "retry", 7: "no key"}, None, {"text": "x" * 9000}, {"kind": "again"}):
        request.add_link(PARENT, attributes)
    request.close()
    links = read_single_record(recording).links
    assert {(link.trace_id, link.span_id) for link in links} == {(bytes(15) + b"\1", bytes(7) + b"\2")}
    found = [link.attributes for link in links]
    assert [found[0], found[1], found[3]] == [{"kind": "retry"}, {}, {"kind": "again"}]
    assert 1000 < len(found[2]["text"]) < 9000, "a value that is too long for the ring is cut"


def test_recorded_exception_has_the_type_of_the_sdk(recording: Recording) -> None:
    request = open_below_parent()
    request.record_exception(ValueError("private text"))
    request.record_exception(np.exceptions.AxisError("private text"))
    request.close()
    attributes = [event.attributes for event in read_single_record(recording).events]
    assert attributes == [{"exception.type": "ValueError"}, {"exception.type": "numpy.exceptions.AxisError"}]


def test_exception_type_overrides_status(recording: Recording) -> None:
    request = open_below_parent()
    request.set_status(StatusCode.ERROR)
    request.close(events.ERROR, "ValueError")
    assert read_single_record(recording).error_type == "ValueError"


def test_unread_span_context_after_end_is_the_parent(
    recording: Recording,
) -> None:
    request = open_below_parent()
    request.close()
    assert request.get_span_context() == PARENT
    assert read_single_record(recording).redundant


def test_read_span_id_is_stable_after_the_end(recording: Recording) -> None:
    request = open_below_parent()
    context = request.get_span_context()
    request._use_parent_context()  # as if the context was read while the request ended
    request.close()
    assert request.get_span_context() == context != PARENT
    assert not read_single_record(recording).redundant


def test_root_request_is_not_redundant(recording: Recording) -> None:
    request = start.open_request("POST", owner="asgi")
    assert request is not None
    request.close()
    assert not read_single_record(recording).redundant
