"""Records as OTLP bytes, without span objects and without protobuf.

Two ways in. `encode_span` writes one span of any shape exactly as the stock protobuf classes would. `StepEncoder` writes
thousands of decode-step spans at once. `envelope` makes a request of what either wrote.

Refuses: clocks, names of its own (they come from `semconv` through the caller), batching, sending.
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
from otel_infer.ringbuffer.events import Value as AttributeValue

__all__ = [
    "AttributeValue",
    "Encoded",
    "SharedAttributes",
    "Span",
    "SpanEvent",
    "SpanLink",
    "StepColumns",
    "StepEncoder",
    "StepOwners",
    "build_export_request",
    "derive_step_span_ids",
    "encode_resource",
    "encode_scope",
    "encode_span",
    "gzip_parts",
]
