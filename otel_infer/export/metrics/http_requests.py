"""Counts HTTP requests into the metric that the conventions have for any HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.counters import CardinalityLimit
from otel_infer.export.metrics.histograms import ExemplarSource, Histogram, HistogramSeries, Label
from otel_infer.ringbuffer import events

MAX_ROUTES = MAX_ERROR_TYPES = 64


class HttpRequestDurations:
    """The durations of the HTTP requests that no other instrumentation records."""

    def __init__(self, durations: HistogramSeries) -> None:
        self._durations = durations
        self._routes, self._error_types = CardinalityLimit(MAX_ROUTES), CardinalityLimit(MAX_ERROR_TYPES)

    def add_request(self, record: RequestRecord, source: ExemplarSource | None) -> None:
        """Counts a request whose server span is ours; where it is another library's, that library counts it."""
        durations = self.find_durations(record)
        if durations is not None:
            durations.record(record.duration_ns / 1e9, source)

    def find_durations(self, record: RequestRecord) -> Histogram | None:
        """Returns the histogram that counts this request; None if another library counts it."""
        method = record.attributes.get(semconv.HTTP_REQUEST_METHOD) or record.name
        if not record.server_span_id or method not in events.METHODS:
            return None
        scheme = record.attributes.get(semconv.URL_SCHEME, "")
        route = str(record.attributes.get(semconv.HTTP_ROUTE, ""))
        labels = self._make_labels(str(method), str(scheme), route, record.status_code, record.error_type)
        return self._durations.get_or_create(labels)

    def add_untraced(self, served: Sequence[events.HttpServed]) -> None:
        """Counts requests that have no span."""
        for event in served:
            labels = self._make_labels(
                event.method, event.scheme, event.route, event.status_code, event.error_type
            )
            self._durations.get_or_create(labels).record((event.at - event.started_at) / 1e9)

    def _make_labels(
        self, method: str, scheme: str, route: str, status_code: int, error_type: str
    ) -> tuple[Label, ...]:
        return (
            method if method in events.METHODS else events.OTHER,
            scheme if scheme in events.SCHEMES and scheme else None,
            self._routes.admit_label(route),
            status_code if 100 <= status_code < 600 else None,
            self._error_types.admit_label(error_type),
        )
