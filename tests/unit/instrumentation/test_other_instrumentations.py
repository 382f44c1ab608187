"""A request that is not opened yet stays current where another instrumentation attaches what it has read from headers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

from otel_infer.instrumentation import other_instrumentations
from otel_infer.tracing import start
from otel_infer.tracing.deferred_request import DeferredRequest
from tests.support.rings import Recording, record_with

REMOTE = trace.set_span_in_context(trace.NonRecordingSpan(trace.SpanContext(1, 2, True)), Context())
LOCAL = trace.set_span_in_context(TracerProvider().get_tracer("a").start_span("b"), Context())


@pytest.fixture
def recording() -> Iterator[Recording]:
    with record_with(other_instrumentations.instrumentor) as recording:
        yield recording


@pytest.mark.parametrize(("attached", "is_kept"), [(REMOTE, True), (Context(), True), (LOCAL, False)])
def test_a_context_without_a_span_of_this_process_keeps_the_request(
    recording: Recording, attached: Context, is_kept: bool
) -> None:
    request = DeferredRequest(lambda: start.open_request("a", owner="test"))
    request.attach()
    token = otel_context.attach(attached)
    assert (start.find_request() is request) == is_kept
    assert trace.get_current_span() is trace.get_current_span(attached)
    otel_context.detach(token)
    assert start.find_request() is request


def test_a_request_that_is_open_is_left_where_a_context_is_attached(recording: Recording) -> None:
    request = start.open_request("a", owner="test")
    assert request is not None
    request.attach()
    token = otel_context.attach(Context())
    assert start.find_request() is None
    otel_context.detach(token)
    request.close()
