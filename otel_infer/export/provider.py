"""Records → spans of a user's own TracerProvider, through the public API only: the in-process mode's last step.

The request span (and the server span, if it is ours) were started live by the provider; here they get their attributes
and end when the request ended. Everything below is started and ended with explicit times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from otel_infer import semconv
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export import otlp
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import startup, tree
from otel_infer.export.spans.exporter import select_steps
from otel_infer.ringbuffer import events
from otel_infer.tracing.pending_spans import ProviderSpans


class TracerProviderExporter:
    """`claim` gives the live spans of a request by its span id, once; None for one that is not this process's."""

    exported_only = False

    def __init__(
        self, tracer: trace.Tracer, claim: Callable[[bytes], ProviderSpans | None], latency_attributes: bool
    ) -> None:
        self._tracer, self._pop_pending, self._latency_attributes = tracer, claim, latency_attributes
        self._startup_contexts: dict[bytes, SpanContext] = {}

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Ends the live spans and writes those below them."""
        inner = self._pop_pending(record.span_id)
        if inner is None:
            return
        server, request = inner
        made: dict[bytes, trace.Span] = {record.span_id: request}
        if server is not None:
            made[record.server_span_id] = server
        if request not in made.values():  # it said all it had to say on the server span
            request.end(record.ended_at + record.wall_offset)
        spans = tree.build_request_spans(record, decision, self._latency_attributes)
        if decision.export:
            for span in spans:
                if span.span_id not in made:
                    made[span.span_id] = self._start_child(span, made.get(span.parent_span_id, request))
            decode = next((span for span in spans if span.name == semconv.SPAN_DECODE), None)
            if decode is not None and decision.steps:
                self._export_steps(record, made[decode.span_id], decision.steps)
        described = {span.span_id: span for span in spans}
        for span_id in reversed(list(made)):
            self._end_span(made[span_id], described.get(span_id), record)

    def export_start(self, record: StartRecord) -> None:
        """Writes the start of this process; its ids are the provider's, by which its first request then links to it."""
        root, *phases = startup.build_start_spans(record)
        above = self._start_startup_span(root, Context())
        self._startup_contexts[root.span_id] = above.get_span_context()
        for phase in phases:
            self._start_startup_span(phase, trace.set_span_in_context(above, Context())).end(phase.end)
        above.end(root.end)

    def _start_startup_span(self, described: otlp.Span, context: Context) -> trace.Span:
        """A span as described, but for its end."""
        span = self._tracer.start_span(described.name, context, start_time=described.start)
        _fill_span(span, described, {})
        return span

    def flush(self, now: int) -> None:
        """Nothing waits here."""

    def _start_child(self, span: otlp.Span, parent: trace.Span) -> trace.Span:
        context = trace.set_span_in_context(parent)
        return self._tracer.start_span(
            span.name, context, SpanKind.INTERNAL, span.all_attributes, start_time=span.start
        )

    def _export_steps(self, record: RequestRecord, parent: trace.Span, granted: int) -> None:
        assert record.steps is not None
        context = trace.set_span_in_context(parent)
        chosen = select_steps(record.steps, granted)
        device = [0] * len(chosen) if chosen.device is None else chosen.device.tolist()
        for (step, started_at, ended_at, tokens, size, prefill), timed in zip(
            chosen.table.T.tolist(), device
        ):
            attributes = {semconv.STEP_ID: step, semconv.BATCH_SIZE: size}
            if tokens != 1:
                attributes[semconv.STEP_TOKENS] = tokens
            if prefill:
                attributes[semconv.INTERFERENCE_PREFILL_TOKENS] = prefill
            if timed > 0:
                attributes[semconv.DEVICE_SPAN] = timed
            start = started_at + record.wall_offset
            span = self._tracer.start_span(
                semconv.SPAN_DECODE_STEP, context, SpanKind.INTERNAL, attributes, start_time=start
            )
            span.end(ended_at + record.wall_offset)

    def _end_span(self, span: trace.Span, described: otlp.Span | None, record: RequestRecord) -> None:
        if described is not None:
            if not _is_renamed(span, record):
                span.update_name(described.name)
            _fill_span(span, described, self._startup_contexts)
        span.end(described.end if described is not None else record.ended_at + record.wall_offset)


def _is_renamed(span: trace.Span, record: RequestRecord) -> bool:
    """Whether user code gave a live span another name than it got on arrival. Where that one was lost, nobody can tell."""
    return record.name not in ("", events.OTHER) and getattr(span, "name", record.name) != record.name


def _fill_span(span: trace.Span, described: otlp.Span, known: Mapping[bytes, SpanContext]) -> None:
    """What a span has besides its name and its times. `known`: who is meant by which id."""
    span.set_attributes(described.all_attributes)
    for event in described.events:
        span.add_event(event.name, dict(event.attributes), event.at)
    for link in described.links:
        span.add_link(known.get(link.span_id) or _link_to_context(link), dict(link.attributes))
    if described.status == tree.STATUS_ERROR:
        span.set_status(Status(StatusCode.ERROR))


def _link_to_context(link: otlp.SpanLink) -> SpanContext:
    """Whether it was sampled is not known, and nobody asks it of a link."""
    trace_id, span_id = (int.from_bytes(part, "big") for part in (link.trace_id, link.span_id))
    return SpanContext(trace_id, span_id, is_remote=True)
