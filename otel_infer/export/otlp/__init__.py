"""Records as OTLP bytes, without span objects and without protobuf.

Two ways in. `encode_span` writes one span of any shape exactly as the stock protobuf classes would. `StepEncoder` writes
thousands of decode-step spans at once. `envelope` makes a request of what either wrote.

Refuses: clocks, names of its own (they come from `semconv` through the caller), batching, sending.
"""

from otel_infer.export.otlp.span_encoder import (
    Encoded,
    Event,
    Link,
    Recurring,
    Span,
    encode_resource,
    encode_scope,
    encode_span,
    envelope,
    gzip1,
)
from otel_infer.export.otlp.step_encoder import StepColumns, StepEncoder, StepOwners, step_span_ids
from otel_infer.ringbuffer.events import Value as AttributeValue

__all__ = [
    "AttributeValue",
    "Encoded",
    "Event",
    "Link",
    "Recurring",
    "Span",
    "StepColumns",
    "StepEncoder",
    "StepOwners",
    "encode_resource",
    "encode_scope",
    "encode_span",
    "envelope",
    "gzip1",
    "step_span_ids",
]
