"""Counts and exports ordinary requests. The spans and series of one shape are described once.

The first request of a shape becomes a record, like any other request. The second one gives the layout of the spans
and the series. A layout is used only if it gives the same bytes as the spans of a record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from otel_infer import semconv
from otel_infer.analysis.finish import finish_records
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.conclude import build_records
from otel_infer.assembly.requests.shapes import ShapedRequest
from otel_infer.export import otlp
from otel_infer.export.interfaces import RequestExporter
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.histograms import make_source
from otel_infer.export.request_log import RequestLog
from otel_infer.export.sampling.tail_sampler import Decision, TailSampler
from otel_infer.export.spans import tree
from otel_infer.export.spans.attributes import has_sampling_reason
from otel_infer.export.spans.exporter import EncodedTree, OtlpSpanExporter
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple
from otel_infer.sidecar.request_shape import RequestShape

log = logging.getLogger(__name__)

MAX_SHAPES = 256
MAX_LAYOUTS = 64
"""Layouts of one shape: its requests differ in keep reason, causes and pauses."""
_KNOWN_ATTRIBUTES = frozenset(
    (
        *events.OPERATION_KEYS,
        *events.RPC_KEYS,
        *events.BATCH_KEYS,
        semconv.HTTP_REQUEST_METHOD,
        semconv.URL_SCHEME,
        semconv.HTTP_ROUTE,
        semconv.URL_PATH,
        semconv.SERVER_ADDRESS,
        semconv.SERVER_PORT,
        semconv.EXECUTION_PROVIDER,
    )
)
_NUMBERS = frozenset((*events.BATCH_KEYS, semconv.ITEMS, semconv.SEND_WAIT))


class OrdinaryRequest(NamedTuple):
    """An ordinary request of a known shape. `causes`: its time by cause, ns."""

    shaped: ShapedRequest
    shape: RequestShape
    causes: Mapping[str, int]

    @property
    def trace_id(self) -> bytes:
        """The id of its trace."""
        return self.shaped.request.arrived.trace_id


FinishedRequest = Union[RequestRecord, OrdinaryRequest]


class OrdinaryRequests:
    """The shapes that were seen, and what is done with their requests."""

    def __init__(
        self, sampler: TailSampler, exporters: Sequence[RequestExporter], request_log: RequestLog
    ) -> None:
        self._sampler, self._request_log = sampler, request_log
        self._exporter: Any = exporters[0] if len(exporters) == 1 else None
        self._shapes: dict[tuple[Any, ...], RequestShape | None] = {}
        self._seen_once: set[tuple[Any, ...]] = set()

    @property
    def can_export(self) -> bool:
        """Whether the exporter takes encoded spans."""
        return isinstance(self._exporter, OtlpSpanExporter)

    def finish_requests(self, assembler: Assembler, horizon: int) -> list[FinishedRequest]:
        """Returns what `finish_requests` does, with ordinary requests of a known shape in their place."""
        finished: list[FinishedRequest] = []
        for each in assembler.drain_ready(horizon):
            if isinstance(each, RequestRecord):
                finished.append(each)
                continue
            ordinary = self._conclude(each)
            finished += build_records([each.request]) if ordinary is None else [ordinary]
        finish_records([each for each in finished if isinstance(each, RequestRecord)])
        return finished

    def count(self, ordinary: OrdinaryRequest, metrics: MetricsAggregator) -> None:
        """Counts a request, as `MetricsAggregator.add_request` does."""
        shaped, shape, causes = ordinary
        series = shape.series
        if series is None or series.version != metrics.series_version:
            shape.series = series = metrics.find_request_series(shape.record)
        source = None
        if metrics.has_exemplars:
            arrived = shaped.request.arrived
            ended_at = shaped.end + arrived.wall_at - arrived.at
            source = make_source(arrived.trace_id, arrived.span_id, ended_at)
        lengths = shaped.lengths if shape.record.operation else ()
        duration = shaped.end - shaped.begin
        lengths = [duration] * (len(series.histograms) - len(lengths)) + [*lengths]
        for histogram, length in zip(series.histograms, lengths):
            histogram.record(length / 1e9, source)
        if series.batch_sizes is not None:
            series.batch_sizes.record(shape.find_batch_size(shaped), source)
        if series.causes is not None:
            metrics.add_causes(series.causes, causes.items())

    def sample(self, ordinary: OrdinaryRequest) -> tuple[FinishedRequest, Decision]:
        """Returns the decision, and the request: as a record if it is logged."""
        shaped = ordinary.shaped
        arrived = shaped.request.arrived
        decision = self._sampler.decide_ordinary(arrived.trace_id, arrived.span_id, shaped.end - shaped.begin)
        if decision.reason in semconv.NOTABLE_REASONS and self._request_log.is_enabled:
            return _build_record(shaped), decision
        return ordinary, decision

    def count_decision(
        self, ordinary: OrdinaryRequest, decision: Decision, metrics: MetricsAggregator
    ) -> None:
        """Counts a decision, as `MetricsAggregator.add_decision` does."""
        metrics.count_kept(decision.reason)
        series = ordinary.shape.series
        if decision.slow and series is not None and series.causes is not None:
            metrics.count_slow(ordinary.causes, series.causes)

    def export(self, ordinary: OrdinaryRequest, decision: Decision) -> None:
        """Exports the spans of a request."""
        shaped, shape, causes = ordinary
        exporter = self._exporter
        top_cause = max(causes, key=causes.__getitem__)
        pauses = _build_events(shaped, decision) if shaped.request.pauses else ()
        layout_key = (
            decision.reason,
            top_cause,
            len(pauses),
            *causes,
            *[each.attributes[semconv.PAUSE_CAUSE] for each in pauses],
        )
        layout = shape.layouts.get(layout_key)
        if layout is None:
            if layout_key not in shape.layouts and len(shape.layouts) < MAX_LAYOUTS:
                shape.layouts[layout_key] = None  # first, because the rest may raise
                shape.layouts[layout_key] = _make_layout(
                    ordinary, decision, pauses, exporter.latency_attributes
                )
            exporter.export_request(_build_record(shaped), decision)
            return
        encoded = layout.encode_tree(_list_values(ordinary, pauses, exporter.latency_attributes))
        exporter.export_encoded(make_tuple(EncodedTree, (encoded, shape.span_count)))

    def _conclude(self, shaped: ShapedRequest) -> OrdinaryRequest | None:
        """Returns a request with its shape; None where the shape is seen for the first time, or not supported."""
        try:
            shape = self._shapes.get(shaped.key) or self._add_shape(shaped)
            if shape is not None:
                fields = shaped, shape, shape.divide_time(shaped)
                return make_tuple(OrdinaryRequest, fields)  # type: ignore[no-any-return]
        except TypeError:  # user code set a list, which no key holds
            pass
        except Exception:  # the request is exported as a record
            log.exception("no shape for a request: trace %s", shaped.request.arrived.trace_id.hex())
        return None

    def _add_shape(self, shaped: ShapedRequest) -> RequestShape | None:
        key = shaped.key
        if key in self._shapes:
            return None
        if key not in self._seen_once:  # names that change with every request are no shapes
            if len(self._seen_once) >= MAX_SHAPES:
                self._seen_once.clear()
            self._seen_once.add(key)
            return None
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = None  # first, because the rest may raise
        self._shapes[key] = shape = _make_shape(shaped)
        return shape


def _make_layout(
    ordinary: OrdinaryRequest,
    decision: Decision,
    pauses: Sequence[otlp.SpanEvent],
    latency_attributes: bool,
) -> otlp.SpanTreeLayout | None:
    """Returns the layout of the spans of requests like this one; None where it does not give their bytes."""
    spans = tree.build_request_spans(_build_record(ordinary.shaped), decision, latency_attributes)
    layout = otlp.SpanTreeLayout(spans, _NUMBERS)
    values = _list_values(ordinary, pauses, latency_attributes)
    is_equal = values == otlp.list_values(spans, _NUMBERS) and layout.encode_tree(values) == b"".join(
        map(otlp.encode_span, spans)
    )
    return layout if is_equal else None


def _build_events(shaped: ShapedRequest, decision: Decision) -> list[otlp.SpanEvent]:
    """Returns the pause events of a request, in order of time."""
    if not has_sampling_reason(decision):
        return []
    request = shaped.request
    offset = request.arrived.wall_at - request.arrived.at
    pauses = sorted(request.pauses, key=lambda pause: pause.cause in semconv.EVENT_LOOP_CAUSES)
    events_of_pauses = tree.build_pause_events(pauses, shaped.begin, shaped.end, offset)
    return sorted(events_of_pauses, key=lambda event: event.at)


def _list_values(
    ordinary: OrdinaryRequest, pauses: Sequence[otlp.SpanEvent], latency_attributes: bool
) -> list[Any]:
    """Returns the values of `otlp.list_values` for the spans of a request."""
    shaped, shape, causes = ordinary
    seen_at, wall_at, trace_id, span_id, parent, server_span_id, *_ = shaped.request.arrived
    offset = wall_at - seen_at
    begin, end = shaped.begin + offset, shaped.end + offset
    above = (parent,) if shape.has_parent else ()
    values: list[Any] = []
    if shape.has_server_span:
        values += (trace_id, server_span_id, *above, begin, end)
        above = (server_span_id,)
    values += (trace_id, span_id, *above, begin, end)
    if shape.record.operation:
        values += [length / 1e9 for length in causes.values()]
        if latency_attributes:
            values.append((shaped.end - shaped.begin) / 1e9)
            values += [shaped.lengths[number] / 1e9 for number in shape.latency_stages]
    if shaped.batch:
        values.append(shaped.batch)
    for pause in pauses:
        values += (pause.at, pause.attributes[semconv.PAUSE_DURATION])
    for link in shaped.request.links:
        values += link[:2]
    if shape.has_stage_spans:
        ids = tree.derive_span_ids(span_id, "stage", len(shaped.lengths))
        for stage_id, since, until, numbers in zip(ids, shaped.starts, shaped.ends, shaped.numbers):
            values += (trace_id, stage_id, span_id, since + offset, until + offset, *numbers)
    return values


def _build_record(shaped: ShapedRequest) -> RequestRecord:
    records = build_records([shaped.request])
    finish_records(records)
    return records[0]


def _make_shape(shaped: ShapedRequest) -> RequestShape | None:
    """Returns the shape of a request; None where it has more than a shape describes."""
    if not _KNOWN_ATTRIBUTES.issuperset(shaped.request.attributes):
        return None
    request = shaped.request
    pauses, request.pauses = request.pauses, ()
    record = _build_record(shaped)
    shape = RequestShape(record)
    causes = shape.divide_time(shaped)
    request.pauses = pauses
    stages = [(stage.started_at, stage.ended_at) for stage in record.stages]
    is_described = (
        record.breakdown is not None
        and list(record.breakdown.causes.items()) == list(causes.items())
        and stages == list(zip(shaped.starts, shaped.ends))
        and not (record.redundant or record.error_type or record.failed_stage)
    )
    return shape if is_described else None
