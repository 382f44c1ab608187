"""Metrics of services that call a model once for a request, or once for a batch of them."""

from __future__ import annotations

from otel_infer.semconv.attributes import OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL
from otel_infer.semconv.metrics import BATCH_BOUNDS, HISTOGRAM, Metric

REQUEST_BATCH_SIZE = Metric(
    "infer.request.batch.size",
    HISTOGRAM,
    "{item}",
    "Items of the model call that served a request which had waited in a queue of the application; one value per request.",
    (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL),
    BATCH_BOUNDS,
)
