"""A user's own TracerProvider receives the same span tree as an OTLP receiver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from otel_infer.assembly.records.request import Interferer, LatencyBreakdown, RequestRecord
from otel_infer.export.provider import ProviderSpans, TracerProviderExporter
from otel_infer.export.sampling.tail_sampler import Decision, TailSampler
from otel_infer.ringbuffer import events
from tests.support.starts import server
from tests.support.story import MS, WALL, RequestHandle, Story, exported, ids, ns, render_spans


class Provider:
    """A provider of the SDK, with the live spans that it started for the records."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**options)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("otel_infer")
        self._inner: dict[bytes, ProviderSpans] = {}
        self.span_exporter = TracerProviderExporter(
            self.tracer, lambda span_id: self._inner.pop(span_id, None), True
        )

    def open(self, record: RequestRecord) -> None:
        """Does the same as `ingress.ProviderOpener` on arrival."""
        began = record.arrived_at + record.wall_offset
        server, context = None, trace.set_span_in_context(trace.INVALID_SPAN)
        if record.server_span_id:
            server = self.tracer.start_span(record.name, context, trace.SpanKind.SERVER, start_time=began)
            context = trace.set_span_in_context(server)
        request = self.tracer.start_span(record.name, context, trace.SpanKind.INTERNAL, start_time=began)
        self._inner[record.span_id] = (server, request)

    def export(self, records: list[RequestRecord], sampler: TailSampler | None = None) -> None:
        sampler = sampler or TailSampler("all", 0, keep_unsampled=False, ratio=False)
        for record in records:
            self.open(record)
            self.span_exporter.export_request(record, sampler.make_decision(record))

    def spans(self) -> list[dict[str, Any]]:
        """Returns the spans in the form of `tests.support.otlp_messages`."""
        return [to_dict(span) for span in self.exporter.get_finished_spans()]


def to_dict(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    attributes = span.attributes or {}
    return {
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": {trace.SpanKind.SERVER: 2, trace.SpanKind.INTERNAL: 1}[span.kind],
        "start": span.start_time,
        "end": span.end_time,
        "attributes": {
            key: list(value) if isinstance(value, tuple) else value for key, value in attributes.items()
        },
        "events": [
            {"at": e.timestamp, "name": e.name, "attributes": dict(e.attributes or {})} for e in span.events
        ],
        "links": [
            {
                "trace_id": f"{link.context.trace_id:032x}",
                "span_id": f"{link.context.span_id:016x}",
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ],
        "status": {trace.StatusCode.UNSET: 0, trace.StatusCode.ERROR: 2}[span.status.status_code],
    }


def comparable(spans: list[dict[str, Any]]) -> list[Any]:
    """Returns all but the ids, which a provider generates; a parent is replaced by its name and time."""
    by_id = {span["span_id"]: (span["name"], span["start"], span["end"]) for span in spans}
    fields = ("name", "kind", "start", "end", "attributes", "events", "links", "status")
    rows = [[by_id.get(span["parent_span_id"]), *(span[key] for key in fields)] for span in spans]
    return sorted(rows, key=repr)


def chat(story: Story, name: str = "a", http: bool = True, flags: int = events.SAMPLED) -> RequestHandle:
    member = story.arrives(0, name, http=http, flags=flags)
    story.stage("tokenize", 2, 4, member, items=3)
    story.submitted(4, member, input_tokens=100, max_tokens=9)
    story.received(5, member)
    story.step(10, 20, [member], {member: 64}, {member: 0}, kv=(1, 4))
    story.step(20, 30, [member], {member: 36}, kv=(1, 4))
    story.step(30, 40, [member, member])
    story.step(40, 45, [member])
    return member


def stories() -> Iterator[Any]:
    story = Story()
    a = chat(story)
    story.add_request_event(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.add_request_event(a, events.AttributeSet(ns(1), "labels", ["x", "y"]))
    story.add_request_event(a, events.SpanEventAdded(ns(6), "cache.miss", {"key": 7}))
    story.add_request_event(a, events.SpanLinked(ns(6), *ids("other")))
    story.add_request_event(a, events.LinkDescribed(ns(6), ids("other")[1].hex(), {"kind": "retry"}))
    story.finished(45, a, tokens=4)
    story.ends(50, a, chunks=4, send_wait=1, detokenize=2)
    yield pytest.param(story, id="streamed")

    story = Story()
    a, b = chat(story, http=False), story.arrives(1, "b", http=False)
    story.step(50, 60, [b, a], {b: 700}, {b: 0})
    story.ends(61, a)
    story.aborts(62, b)
    yield pytest.param(story, id="two requests")

    story = Story()
    a = chat(story)
    for step, (since, until) in {3: (31, 39), 4: (40, 44)}.items():
        story.timed(step, since, until)
    story.ends(50, a)
    yield pytest.param(story, id="timed on a device")

    story = Story()
    story.ends(70, chat(story), events.ERROR, "ValueError", status=500)
    yield pytest.param(story, id="failed")

    story = Story()
    story.add_request_event(a := chat(story), events.NameUpdated(ns(3), "answer"))
    story.aborts(70, a, "timeout")
    yield pytest.param(story, id="timeout")

    story = Story()
    a = story.arrives(0, http=False, flags=events.SAMPLED | events.NON_GENERATIVE, operation="embeddings")
    story.stage("forward", 2, 4, a)
    story.ends(5, a)
    yield pytest.param(story, id="embeddings")


@pytest.mark.parametrize("story", stories())
def test_provider_spans_equal_the_otlp_spans(story: Story) -> None:
    provider = Provider()
    provider.export(story.records())
    assert comparable(provider.spans()) == comparable(exported(story.records(), latency=True))
    assert render_spans(provider.spans()) == render_spans(exported(story.records(), latency=True))


def test_interferer_link_has_delay_and_class() -> None:
    story = Story()
    story.ends(50, chat(story))
    record = story.record()
    record.breakdown = LatencyBreakdown(
        {"interference": 8 * MS}, Interferer(*ids("interferer"), 8 * MS, "long")
    )
    provider = Provider()
    provider.export([record])
    assert comparable(provider.spans()) == comparable(exported([record], latency=True))
    (link,) = [link for span in provider.spans() for link in span["links"]]
    assert link["attributes"] == {"infer.interference.delay": 0.008, "infer.interference.class": "long"}


@pytest.mark.parametrize(
    ("arrived_as", "names"),
    [
        ("POST", ("POST /v1/chat/completions", "answer")),
        ("_OTHER", ("POST /v1/chat/completions", "chat toy")),
        ("", ("POST /v1/chat/completions", "chat toy")),
    ],
)
def test_user_span_name_is_kept_if_recognized(arrived_as: str, names: tuple[str, str]) -> None:
    """The default name (`arrived_as`) is unknown where events were lost or the name exceeded the ring's text space."""
    story = Story()
    story.ends(50, chat(story))
    record = story.record()
    provider = Provider()
    provider.open(record)
    server, request = provider._inner[record.span_id]
    request.update_name("answer")
    record.name = arrived_as
    provider.span_exporter.export_request(record, Decision(True, 0, "none"))
    spans = {
        span["kind"]: span["name"] for span in provider.spans() if span["span_id"] in live(server, request)
    }
    assert (spans[2], spans[1]) == names


def live(*spans: trace.Span | None) -> list[str]:
    return [f"{span.get_span_context().span_id:016x}" for span in spans if span is not None]


def test_only_the_granted_steps_are_exported() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.open(story.record())
    provider.span_exporter.export_request(story.record(), Decision(True, 1, "budget"))
    spans = provider.spans()
    assert [span["name"] for span in spans].count("decode step") == 1
    assert [span["name"] for span in spans].count("prefill step") == 0


def test_http_request_without_stages_ends_both_spans() -> None:
    """The live span cannot be withdrawn, because it may already be the parent of another span."""
    story = Story()
    a = story.arrives(0, operation="")
    story.add_request_event(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.ends(3, a)
    provider = Provider()
    provider.export(story.records())
    server, request = sorted(provider.spans(), key=lambda span: -span["kind"])
    assert (server["name"], server["attributes"]["tenant"]) == ("POST /health", "blue")
    assert (request["name"], request["attributes"]) == ("POST", {})
    assert {span["end"] for span in (server, request)} == {WALL + 3 * MS}


def test_unsampled_request_only_ends_its_live_spans() -> None:
    story = Story()
    story.ends(50, chat(story, flags=0))
    provider = Provider(sampler=ALWAYS_OFF)
    provider.export(story.records())
    assert provider.spans() == []
    assert provider.span_exporter._pop_pending(story.record().span_id) is None


def test_request_of_another_process_is_ignored() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.span_exporter.export_request(story.record(), Decision(True, 9, "all"))
    assert provider.spans() == []
    provider.span_exporter.flush(0)


def test_first_request_links_to_the_provider_start_ids() -> None:
    story = server()
    first = story.arrives(9500)
    story.ends(9600, first)
    provider = Provider()
    for record in story.starts():
        provider.span_exporter.export_start(record)
    assert render_spans(provider.spans()) == render_spans(story.start_spans())
    root = next(span for span in provider.exporter.get_finished_spans() if span.name == "server start")
    provider.export(story.records())
    request = next(span for span in provider.exporter.get_finished_spans() if span.name == "chat toy")
    assert [link.context for link in request.links] == [root.context]


def test_live_spans_are_used_once() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.export(story.records())
    count = len(provider.spans())
    provider.span_exporter.export_request(story.record(), Decision(True, 9, "all"))
    assert len(provider.spans()) == count
