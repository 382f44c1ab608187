"""Identities are as the sampler wants them; a provider's live spans wait for their request to be concluded, but not for ever."""

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


def ended() -> tuple[ReadableSpan, ...]:
    spans = exporter.get_finished_spans()
    exporter.clear()
    return spans


def spans_of(name: str) -> ProviderSpans:
    tracer = provider.get_tracer("test")
    return tracer.start_span(f"server {name}"), tracer.start_span(name)


def test_spans_can_be_claimed_once_and_are_not_ended_by_that() -> None:
    unclaimed, inner = PendingProviderSpans(), spans_of("a")
    unclaimed.add(b"a", inner)
    assert unclaimed.pop(b"a") is inner
    assert unclaimed.pop(b"a") is None
    assert ended() == ()


def test_spans_that_nobody_ever_claims_end_when_too_many_others_have_come() -> None:
    unclaimed = PendingProviderSpans(most=2)
    for name in "abc":
        unclaimed.add(name.encode(), spans_of(name))
    assert [span.name for span in ended()] == ["a", "server a"]
    assert unclaimed.pop(b"a") is None
    assert unclaimed.pop(b"b") is not None


def test_a_request_without_a_server_span_has_one_span_to_end() -> None:
    unclaimed = PendingProviderSpans(most=0)
    unclaimed.add(b"a", (None, provider.get_tracer("test").start_span("a")))
    assert [span.name for span in ended()] == ["a"]


def test_a_request_that_cannot_be_recorded_ends_its_own_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live table was full, say: no record will ever claim them."""
    monkeypatch.setattr(request_span, "span_factory", ProviderSpanFactory(provider.get_tracer("test")))
    monkeypatch.setattr(recorder, "active", True)
    monkeypatch.setattr(recorder, "open_request", lambda arrived: 0)
    request = start.open_request("chat", owner="test", server=True)
    assert request is not None
    assert ended() == ()
    request.close()
    request.close()
    assert [span.name for span in ended()] == ["chat", "chat"]
    assert (
        request_span.pending_provider_spans.pop(request.get_span_context().span_id.to_bytes(8, "big")) is None
    )


def test_a_processor_that_raises_stops_nobody() -> None:
    class Broken(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise OSError

    broken = TracerProvider()
    broken.add_span_processor(Broken(exporter))
    unclaimed = PendingProviderSpans(most=0)
    unclaimed.add(b"a", (None, broken.get_tracer("test").start_span("a")))
    assert unclaimed.pop(b"a") is None


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
@given(above=parents, own_server=st.booleans())
def test_what_a_sampler_decides_is_the_same_whether_it_is_asked_or_known(
    sampler: Any, above: SpanContext, own_server: bool
) -> None:
    around = trace.set_span_in_context(NonRecordingSpan(above))
    opener = SdkSpanFactory(sampler, RandomIdGenerator(), Limits())
    assert opener._constant_sampler is not None
    known = opener.create_span("POST", around, above, own_server, 0)
    opener._constant_sampler = None
    asked = opener.create_span("POST", around, above, own_server, 0)
    assert known.request.trace_flags == asked.request.trace_flags
    assert (known.request.trace_state or None) == (asked.request.trace_state or None)
    assert (known.server is None, known.parent) == (asked.server is None, asked.parent)
    assert (known.flags, known.has_server) == (asked.flags, asked.has_server)
    assert (known.trace_state or None) == (asked.trace_state or None)
    trace_id, span_id, above_id, server_id = known.ids
    assert above_id == asked.ids[2] and (trace_id == asked.ids[0]) == above.is_valid
    assert [any(some) for some in (trace_id, span_id, server_id)] == [True, True, own_server]
    assert (known.request.trace_id, known.request.span_id) == (
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
    )
    if known.server is not None:
        assert known.server.span_id == int.from_bytes(server_id, "big") != known.request.span_id


def test_a_sampler_of_somebody_elses_is_asked_each_time() -> None:
    class Odd(sampling.StaticSampler):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    assert (
        SdkSpanFactory(Odd(sampling.Decision.DROP), RandomIdGenerator(), Limits())._constant_sampler is None
    )


def test_applications_that_seed_their_chance_have_ids_of_their_own_all_the_same() -> None:
    ids = []
    for _ in range(2):
        random.seed(42)
        ids.append(span_ids._random_ids())
    assert len(set(ids)) == 2


def test_a_forked_process_has_other_ids() -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, span_ids._random_ids())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(ours, 16) != span_ids._random_ids()
    os.close(ours)
    os.close(theirs)
