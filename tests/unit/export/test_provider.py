"""A user's own provider gets the same tree as a receiver of OTLP does."""

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
from tests.support.story import MS, WALL, Story, Who, drawn, exported, ids, ns


class Provider:
    """A provider of the SDK, with the live spans that it started for records."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**options)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("otel_infer")
        self._inner: dict[bytes, ProviderSpans] = {}
        self.sink = TracerProviderExporter(self.tracer, lambda span_id: self._inner.pop(span_id, None), True)

    def open(self, record: RequestRecord) -> None:
        """As `ingress.ProviderOpener` does on arrival."""
        began = record.arrived_at + record.wall_offset
        server, context = None, trace.set_span_in_context(trace.INVALID_SPAN)
        if record.server_span_id:
            server = self.tracer.start_span(record.name, context, trace.SpanKind.SERVER, start_time=began)
            context = trace.set_span_in_context(server)
        request = self.tracer.start_span(record.name, context, trace.SpanKind.INTERNAL, start_time=began)
        self._inner[record.span_id] = (server, request)

    def take(self, records: list[RequestRecord], keeps: TailSampler | None = None) -> None:
        keeps = keeps or TailSampler("all", 0, keep_unsampled=False, ratio=False)
        for record in records:
            self.open(record)
            self.sink.export_request(record, keeps.make_decision(record))

    def spans(self) -> list[dict[str, Any]]:
        """As `tests.support.otlp_messages` shows spans."""
        return [plain(span) for span in self.exporter.get_finished_spans()]


def plain(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    said = span.attributes or {}
    return {
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_span_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "kind": {trace.SpanKind.SERVER: 2, trace.SpanKind.INTERNAL: 1}[span.kind],
        "start": span.start_time,
        "end": span.end_time,
        "attributes": {
            key: list(value) if isinstance(value, tuple) else value for key, value in said.items()
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
    """Everything but ids, which a provider makes itself; for a parent stands its name and time."""
    by_id = {span["span_id"]: (span["name"], span["start"], span["end"]) for span in spans}
    said = ("name", "kind", "start", "end", "attributes", "events", "links", "status")
    rows = [[by_id.get(span["parent_span_id"]), *(span[key] for key in said)] for span in spans]
    return sorted(rows, key=repr)


def chat(story: Story, name: str = "a", http: bool = True, flags: int = events.SAMPLED) -> Who:
    who = story.arrives(0, name, http=http, flags=flags)
    story.stage("tokenize", 2, 4, who, items=3)
    story.submitted(4, who, input_tokens=100, max_tokens=9)
    story.received(5, who)
    story.step(10, 20, [who], {who: 64}, {who: 0}, kv=(1, 4))
    story.step(20, 30, [who], {who: 36}, kv=(1, 4))
    story.step(30, 40, [who, who])
    story.step(40, 45, [who])
    return who


def stories() -> Iterator[Any]:
    story = Story()
    a = chat(story)
    story.state(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.state(a, events.AttributeSet(ns(1), "labels", ["x", "y"]))
    story.state(a, events.SpanEventAdded(ns(6), "cache.miss", {"key": 7}))
    story.state(a, events.SpanLinked(ns(6), *ids("other")))
    story.state(a, events.LinkDescribed(ns(6), ids("other")[1].hex(), {"kind": "retry"}))
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
    story.state(a := chat(story), events.NameUpdated(ns(3), "answer"))
    story.aborts(70, a, "timeout")
    yield pytest.param(story, id="timeout")

    story = Story()
    a = story.arrives(0, http=False, flags=events.SAMPLED | events.NON_GENERATIVE, operation="embeddings")
    story.stage("forward", 2, 4, a)
    story.ends(5, a)
    yield pytest.param(story, id="embeddings")


@pytest.mark.parametrize("story", stories())
def test_a_provider_gets_what_a_receiver_gets(story: Story) -> None:
    provider = Provider()
    provider.take(story.records())
    assert comparable(provider.spans()) == comparable(exported(story.records(), latency=True))
    assert drawn(provider.spans()) == drawn(exported(story.records(), latency=True))


def test_the_link_to_whom_held_a_request_up_says_for_how_long_and_of_what_class() -> None:
    story = Story()
    story.ends(50, chat(story))
    record = story.record()
    record.breakdown = LatencyBreakdown(
        {"interference": 8 * MS}, Interferer(*ids("offender"), 8 * MS, "long")
    )
    provider = Provider()
    provider.take([record])
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
def test_a_name_that_user_code_gave_stays_if_it_is_known_that_it_did(
    arrived_as: str, names: tuple[str, str]
) -> None:
    """`arrived_as`: where facts were lost, or there was no room for a text, nobody knows what name the span had."""
    story = Story()
    story.ends(50, chat(story))
    record = story.record()
    provider = Provider()
    provider.open(record)
    server, request = provider._inner[record.span_id]
    request.update_name("answer")
    record.name = arrived_as
    provider.sink.export_request(record, Decision(True, 0, "none"))
    spans = {
        span["kind"]: span["name"] for span in provider.spans() if span["span_id"] in live(server, request)
    }
    assert (spans[2], spans[1]) == names


def live(*spans: trace.Span | None) -> list[str]:
    return [f"{span.get_span_context().span_id:016x}" for span in spans if span is not None]


def test_only_so_many_steps_as_were_granted() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.open(story.record())
    provider.sink.export_request(story.record(), Decision(True, 1, "budget"))
    spans = provider.spans()
    assert [span["name"] for span in spans].count("decode step") == 1
    assert [span["name"] for span in spans].count("prefill step") == 0


def test_an_http_request_that_reached_nothing_is_described_on_the_server_span_and_ends_both() -> None:
    """The live one cannot be taken back, for it may have become somebody's parent."""
    story = Story()
    a = story.arrives(0, operation="")
    story.state(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.ends(3, a)
    provider = Provider()
    provider.take(story.records())
    server, request = sorted(provider.spans(), key=lambda span: -span["kind"])
    assert (server["name"], server["attributes"]["tenant"]) == ("POST /health", "blue")
    assert (request["name"], request["attributes"]) == ("POST", {})
    assert {span["end"] for span in (server, request)} == {WALL + 3 * MS}


def test_what_is_not_sampled_ends_its_live_spans_and_starts_no_others() -> None:
    story = Story()
    story.ends(50, chat(story, flags=0))
    provider = Provider(sampler=ALWAYS_OFF)
    provider.take(story.records())
    assert provider.spans() == []
    assert provider.sink._pop_pending(story.record().span_id) is None


def test_a_request_of_another_process_is_left_alone() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.sink.export_request(story.record(), Decision(True, 9, "all"))
    assert provider.spans() == []
    provider.sink.flush(0)


def test_a_start_gets_ids_of_the_provider_by_which_the_first_request_links_to_it() -> None:
    story = server()
    first = story.arrives(9500)
    story.ends(9600, first)
    provider = Provider()
    for record in story.starts():
        provider.sink.export_start(record)
    assert drawn(provider.spans()) == drawn(story.start_spans())
    root = next(span for span in provider.exporter.get_finished_spans() if span.name == "server start")
    provider.take(story.records())
    request = next(span for span in provider.exporter.get_finished_spans() if span.name == "chat toy")
    assert [link.context for link in request.links] == [root.context]


def test_a_request_is_claimed_once() -> None:
    story = Story()
    story.ends(50, chat(story))
    provider = Provider()
    provider.take(story.records())
    count = len(provider.spans())
    provider.sink.export_request(story.record(), Decision(True, 9, "all"))
    assert len(provider.spans()) == count
