"""Exports records as spans of a user's own TracerProvider, through the public API only.

For the in-process mode.

The provider started the request span (and the server span, if it is ours) live. Here they get their
attributes, and end when the request ended. All spans below them are started and ended with explicit times.
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
from otel_infer.ringbuffer.ledger import RequestLedger
from otel_infer.tracing.pending_spans import ProviderSpans


class TracerProviderExporter:
    """Exporter to a TracerProvider.

    `pop_pending`: returns the live spans of a request by its span id, once; None for a request of another
    process. `ledger`: counts the requests; what the provider does with their spans is not known.
    """

    exported_only = False

    def __init__(
        self,
        tracer: trace.Tracer,
        pop_pending: Callable[[bytes], ProviderSpans | None],
        latency_attributes: bool,
        ledger: RequestLedger | None = None,
    ) -> None:
        self.taken, self._ledger = 0, ledger or RequestLedger()
        self._tracer, self._pop_pending, self._latency_attributes = tracer, pop_pending, latency_attributes
        self._startup_contexts: dict[bytes, SpanContext] = {}

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Ends the live spans of a request, and exports the spans below them."""
        pending = self._pop_pending(record.span_id)
        self.taken += decision.export
        if pending is None:
            if decision.export:
                self._ledger.add_lost(semconv.LOSS_NOT_CONVERTED)
            return
        self._end_spans(record, decision, *pending)
        if decision.export:
            self._ledger.add_result(semconv.EXPORT_RESULT_EXPORTED)

    def _end_spans(
        self,
        record: RequestRecord,
        decision: tail_sampler.Decision,
        server: trace.Span | None,
        request: trace.Span,
    ) -> None:
        started: dict[bytes, trace.Span] = {record.span_id: request}
        if server is not None:
            started[record.server_span_id] = server
        if request not in started.values():  # it reached no engine: the server span has everything
            request.end(record.ended_at + record.wall_offset)
        spans = tree.build_request_spans(record, decision, self._latency_attributes)
        if decision.export:
            for span in spans:
                if span.span_id not in started:
                    started[span.span_id] = self._start_child(span, started.get(span.parent_span_id, request))
            decode = next((span for span in spans if span.name == semconv.SPAN_DECODE), None)
            if decode is not None and decision.steps:
                self._export_steps(record, started[decode.span_id], decision.steps)
        described = {span.span_id: span for span in spans}
        for span_id in reversed(list(started)):
            self._end_span(started[span_id], described.get(span_id), record)

    def export_start(self, record: StartRecord) -> None:
        """Exports the start of this process.

        Its span has an id of the provider; the first request links to that id.
        """
        root, *phases = startup.build_start_spans(record)
        parent = self._start_startup_span(root, Context())
        self._startup_contexts[root.span_id] = parent.get_span_context()
        for phase in phases:
            self._start_startup_span(phase, trace.set_span_in_context(parent, Context())).end(phase.end)
        parent.end(root.end)

    def _start_startup_span(self, described: otlp.Span, context: Context) -> trace.Span:
        """Starts a span as described, and leaves it open."""
        span = self._tracer.start_span(described.name, context, start_time=described.start)
        _fill_span(span, described, {})
        return span

    def flush(self, now: int) -> None:
        """Does nothing, because no span waits here."""

    def _start_child(self, span: otlp.Span, parent: trace.Span) -> trace.Span:
        context = trace.set_span_in_context(parent)
        return self._tracer.start_span(
            span.name, context, SpanKind.INTERNAL, span.all_attributes, start_time=span.start
        )

    def _export_steps(self, record: RequestRecord, parent: trace.Span, granted: int) -> None:
        assert record.steps is not None
        context = trace.set_span_in_context(parent)
        selected = select_steps(record.steps, granted)
        device = [0] * len(selected) if selected.device is None else selected.device.tolist()
        for (step, started_at, ended_at, tokens, size, prefill), timed in zip(
            selected.table.T.tolist(), device
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
    """Returns whether user code renamed a live span since its arrival.

    Returns False if the name at arrival is not known.
    """
    return record.name not in ("", events.OTHER) and getattr(span, "name", record.name) != record.name


def _fill_span(span: trace.Span, described: otlp.Span, known: Mapping[bytes, SpanContext]) -> None:
    """Sets what a span has besides its name and times.

    `known`: contexts of exported spans by span id, for links.
    """
    span.set_attributes(described.all_attributes)
    for event in described.events:
        span.add_event(event.name, dict(event.attributes), event.at)
    for link in described.links:
        span.add_link(known.get(link.span_id) or _link_to_context(link), dict(link.attributes))
    if described.status == tree.STATUS_ERROR:
        span.set_status(Status(StatusCode.ERROR))


def _link_to_context(link: otlp.SpanLink) -> SpanContext:
    """Returns the context of a link without the sampled flag, which is unknown."""
    trace_id, span_id = (int.from_bytes(part, "big") for part in (link.trace_id, link.span_id))
    return SpanContext(trace_id, span_id, is_remote=True)
