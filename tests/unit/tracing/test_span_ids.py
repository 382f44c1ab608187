"""Span ids match the sampler's decision; a provider's pending spans wait for the record of their request, up to a limit."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, span_ids, start
from otel_infer.tracing.pending_spans import PendingProviderSpans, ProviderSpans
from otel_infer.tracing.span_ids import Limits, ProviderSpanFactory, SdkSpanFactory

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))


def pop_ended_spans() -> tuple[ReadableSpan, ...]:
    spans = exporter.get_finished_spans()
    exporter.clear()
    return spans


def start_provider_spans(name: str) -> ProviderSpans:
    tracer = provider.get_tracer("test")
    return tracer.start_span(f"server {name}"), tracer.start_span(name)


def test_pending_spans_are_claimed_once_without_ending() -> None:
    pending, inner = PendingProviderSpans(), start_provider_spans("a")
    pending.add(b"a", inner)
    assert pending.pop(b"a") is inner
    assert pending.pop(b"a") is None
    assert pop_ended_spans() == ()


def test_oldest_unclaimed_spans_end_beyond_the_limit() -> None:
    pending = PendingProviderSpans(most=2)
    for name in "abc":
        pending.add(name.encode(), start_provider_spans(name))
    assert [span.name for span in pop_ended_spans()] == ["a", "server a"]
    assert pending.pop(b"a") is None
    assert pending.pop(b"b") is not None


def test_request_without_server_span_has_one_pending_span() -> None:
    pending = PendingProviderSpans(most=0)
    pending.add(b"a", (None, provider.get_tracer("test").start_span("a")))
    assert [span.name for span in pop_ended_spans()] == ["a"]


def test_unrecorded_request_ends_its_own_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live table is full, for example, so no record claims the spans."""
    monkeypatch.setattr(request_span, "span_factory", ProviderSpanFactory(provider.get_tracer("test")))
    monkeypatch.setattr(recorder, "active", True)
    monkeypatch.setattr(recorder, "open_request", lambda arrived: 0)
    request = start.open_request("chat", owner="test", server=True)
    assert request is not None
    assert pop_ended_spans() == ()
    request.close()
    request.close()
    assert [span.name for span in pop_ended_spans()] == ["chat", "chat"]
    assert (
        request_span.pending_provider_spans.pop(request.get_span_context().span_id.to_bytes(8, "big")) is None
    )


def test_raising_processor_does_not_stop_the_eviction() -> None:
    class Broken(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise OSError

    broken = TracerProvider()
    broken.add_span_processor(Broken(exporter))
    pending = PendingProviderSpans(most=0)
    pending.add(b"a", (None, broken.get_tracer("test").start_span("a")))
    assert pending.pop(b"a") is None


parents = st.builds(
    SpanContext,
    st.sampled_from((0, 7)),
    st.just(9),
    st.booleans(),
    st.sampled_from((TraceFlags(0), TraceFlags(1), TraceFlags(2), TraceFlags(3))),
    st.sampled_from((None, TraceState([("ot", "th:8")]))),
)


@pytest.mark.parametrize(
    "sampler", [sampling.DEFAULT_ON, sampling.DEFAULT_OFF, sampling.ALWAYS_ON, sampling.ALWAYS_OFF]
)
@given(parent=parents, own_server=st.booleans())
def test_constant_sampler_shortcut_matches_the_sampler(
    sampler: Any, parent: SpanContext, own_server: bool
) -> None:
    context = trace.set_span_in_context(NonRecordingSpan(parent))
    factory = SdkSpanFactory(sampler, RandomIdGenerator(), Limits())
    assert factory.plain_sampler is not None
    shortcut = factory.create_span("POST", context, parent, own_server, 0)
    factory.plain_sampler = None
    sampled = factory.create_span("POST", context, parent, own_server, 0)
    assert shortcut.request.trace_flags == sampled.request.trace_flags
    assert (shortcut.request.trace_state or None) == (sampled.request.trace_state or None)
    assert (shortcut.server is None, shortcut.parent) == (sampled.server is None, sampled.parent)
    assert (shortcut.flags, shortcut.has_server) == (sampled.flags, sampled.has_server)
    assert (shortcut.trace_state or None) == (sampled.trace_state or None)
    trace_id, span_id, parent_id, server_id = shortcut.ids
    assert parent_id == sampled.ids[2] and (trace_id == sampled.ids[0]) == parent.is_valid
    assert [any(identifier) for identifier in (trace_id, span_id, server_id)] == [True, True, own_server]
    assert (shortcut.request.trace_id, shortcut.request.span_id) == (
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
    )
    if shortcut.server is not None:
        assert shortcut.server.span_id == int.from_bytes(server_id, "big") != shortcut.request.span_id


def test_custom_sampler_has_no_constant_shortcut() -> None:
    class Odd(sampling.StaticSampler):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    assert SdkSpanFactory(Odd(sampling.Decision.DROP), RandomIdGenerator(), Limits()).plain_sampler is None


def test_seeded_random_does_not_repeat_ids() -> None:
    ids = []
    for _ in range(2):
        random.seed(42)
        ids.append(span_ids._random_ids())
    assert len(set(ids)) == 2


def test_forked_process_has_different_ids() -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, span_ids._random_ids())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 16) != span_ids._random_ids()
    os.close(read_end)
    os.close(write_end)
