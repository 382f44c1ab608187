"""Defines the metric that the conventions have for any HTTP server."""

from __future__ import annotations

from otel_infer.semconv.attributes import (
    ERROR_TYPE,
    HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE,
    HTTP_ROUTE,
    URL_SCHEME,
)
from otel_infer.semconv.metrics import HISTOGRAM, Metric

# The recommended bounds, and more for streams.
HTTP_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

HTTP_REQUEST_DURATION = Metric(
    "http.server.request.duration",
    HISTOGRAM,
    "s",
    "Arrival to last byte of every HTTP request, unless another instrumentation records it.",
    (HTTP_REQUEST_METHOD, URL_SCHEME, HTTP_ROUTE, HTTP_RESPONSE_STATUS_CODE, ERROR_TYPE),
    HTTP_BOUNDS,
)
