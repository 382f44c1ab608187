"""Encodes records as OTLP bytes, without span objects and without protobuf.

`encode_span` encodes one span of any shape, byte for byte like the stock protobuf classes. `StepEncoder`
encodes thousands of decode-step spans at a time. `build_export_request` combines their output into one
request.

Not in here: clocks, names (callers pass them from `semconv`), batching, sending.
"""

from otel_infer.export.otlp.span_encoder import (
    Encoded,
    SharedAttributes,
    Span,
    SpanEvent,
    SpanLink,
    build_export_request,
    encode_resource,
    encode_scope,
    encode_span,
    gzip_parts,
)
from otel_infer.export.otlp.step_encoder import StepColumns, StepEncoder, StepOwners, derive_step_span_ids
from otel_infer.export.otlp.tree_layout import SpanTreeLayout, list_values
from otel_infer.ringbuffer.events import Value as AttributeValue

__all__ = [
    "AttributeValue",
    "Encoded",
    "SharedAttributes",
    "Span",
    "SpanEvent",
    "SpanLink",
    "SpanTreeLayout",
    "StepColumns",
    "StepEncoder",
    "StepOwners",
    "build_export_request",
    "derive_step_span_ids",
    "encode_resource",
    "encode_scope",
    "encode_span",
    "gzip_parts",
    "list_values",
]
