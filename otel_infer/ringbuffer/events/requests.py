"""Events of one request: arrival, stages, scheduling, tokens, end, and additions of user code to its span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

from otel_infer import semconv

Value = Union[str, bool, int, float, Sequence[str], Sequence[bool], Sequence[int], Sequence[float]]
"""Types that OpenTelemetry allows as an attribute value."""

NONE = 0
"""String id of an absent string."""
OTHER = "_OTHER"
"""Replacement for a string when the string table is full (the value of the OpenTelemetry conventions)."""

# Flags of RequestArrived.
SAMPLED = 1
REMOTE_PARENT = 2
OWN_SERVER_SPAN = 4
NON_GENERATIVE = 8
JOINED = 16
"""The arrival is a part of a request that arrived in another process; the trace id and span id are that
request's.
"""

# Outcomes of RequestEnded.
OK = 0
ERROR = 1
ABORTED = 2
CANCELLED, TIMEOUT, CLIENT_DISCONNECT = (
    semconv.ERROR_CANCELLED,
    semconv.ERROR_TIMEOUT,
    semconv.ERROR_CLIENT_DISCONNECT,
)
"""Error types of aborted requests."""
TOKENIZE, FETCH_MEDIA, PREPARE_MEDIA = (
    semconv.SPAN_TOKENIZE,
    semconv.SPAN_FETCH_MEDIA,
    semconv.SPAN_PREPARE_MEDIA,
)
ACCEPT, POOL_WAIT, LOCK_WAIT = semconv.SPAN_ACCEPT, semconv.SPAN_POOL_WAIT, semconv.SPAN_LOCK_WAIT
QUEUE_WAIT, BATCH_WAIT = semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT
WAIT_KINDS = semconv.WAIT_KINDS
"""The `items` of a `LOCK_WAIT` are the position in this list, from 1."""
GRAMMAR, KV_TRANSFER = semconv.SPAN_GRAMMAR, semconv.SPAN_KV_TRANSFER
FORWARD, DECODE = semconv.SPAN_FORWARD, semconv.SPAN_DECODE
"""Names of stages that instrumentations record."""
OUTCOME_NAMES = {OK: "ok", ERROR: "error", ABORTED: "aborted"}
"""How logs, reports and the terminal name outcomes."""


class RequestArrived(NamedTuple):
    """Arrival of a request; `wall_at` (unix ns) pairs with `at`. Absent ids are zero bytes."""

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    server_span_id: bytes
    flags: int
    operation: str
    provider: str
    model: str
    name: str


RAISED = -1
"""In place of the number of items of a stage: an exception left it."""


class StageEnded(NamedTuple):
    """Named interval of a request, recorded when it ends. `items`: 0 = unknown, or `RAISED`."""

    at: int
    started_at: int
    stage: str
    items: int


PINNED_UNKNOWN = 2


class BytesMoved(NamedTuple):
    """Stage that moved `size` bytes to or from a device, recorded when it ends.

    `pinned`: whether the host memory was page-locked, 0 or 1, or `PINNED_UNKNOWN`.
    """

    at: int
    started_at: int
    stage: str
    size: int
    pinned: int


class CacheHeld(NamedTuple):
    """Size in bytes of the request's own KV cache, which it shares with no other request."""

    at: int
    size: int


class RequestSubmitted(NamedTuple):
    """Hand-over to the engine. `input_tokens`, `max_tokens`: 0 = unknown.

    `sequences`: 0 = further sequences of the same prompt.
    """

    at: int
    sequences: int
    input_tokens: int
    max_tokens: int
    engine: str


class RequestReceived(NamedTuple):
    """Receipt by the engine's scheduler; the time from the hand-over to it is the hidden queue."""

    at: int


class RequestScheduled(NamedTuple):
    """First scheduling, for engines whose steps are not recorded; otherwise it follows from the steps."""

    at: int


class RequestPreempted(NamedTuple):
    """Return to the queue, to free KV blocks. `kind`: `offload` (KV kept elsewhere) or `recompute`."""

    at: int
    kind: str


class PrefixRead(NamedTuple):
    """Look-up of a prompt of `tokens` tokens in the engine's prefix cache, which held `cached` of them."""

    at: int
    tokens: int
    cached: int


class TokensDrafted(NamedTuple):
    """Tokens drafted and accepted for a sequence while it was in the engine (speculative decoding)."""

    at: int
    drafted: int
    accepted: int


class TokenReached(NamedTuple):
    """Arrival of the first token in the part of the server that serves the client, after the step."""

    at: int


class FirstTokenSent(NamedTuple):
    """First chunk with a token, recorded just before it is handed to the socket."""

    at: int


class ResponseStarted(NamedTuple):
    """First byte of the response body, recorded just before it is handed to the socket."""

    at: int


class EngineFinished(NamedTuple):
    """End of one sequence in the engine.

    `reason`: stop, length, abort, error. Tokens: 0 = take them from the steps.
    """

    at: int
    reason: str
    output_tokens: int


class RequestEnded(NamedTuple):
    """End of a request: the last byte was handed over, or it failed.

    Lengths in ns; `status_code`: 0 = no HTTP.
    """

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int


class AttributeSet(NamedTuple):
    """Attribute that user code set on the live request span (limits already applied)."""

    at: int
    key: str
    value: Value


class OperationNamed(NamedTuple):
    """Operation, provider and served model became known after the arrival; "" = unknown. Three attributes in one event."""

    at: int
    operation: str
    provider: str
    model: str


class ModelPlaced(NamedTuple):
    """The request's model runs on this execution provider or device. An attribute that needs no JSON."""

    at: int
    provider: str


class SpanEventAdded(NamedTuple):
    """Event that user code added to the live request span."""

    at: int
    name: str
    attributes: Mapping[str, Value]


class SpanLinked(NamedTuple):
    """Link from the live request span to another span: of user code, or to another request of its batch."""

    at: int
    trace_id: bytes
    span_id: bytes


class BatchFormed(NamedTuple):
    """The request is one of so many that a worker has collected for one call of a model."""

    at: int
    requests: int


class LinkDescribed(NamedTuple):
    """Attributes of the link that user code has just added, to the span with this id (hex)."""

    at: int
    span_id: str
    attributes: Mapping[str, Value]


class NameUpdated(NamedTuple):
    """Name that user code gave to the live request span."""

    at: int
    name: str


class StateCarried(NamedTuple):
    """Sampling entries of the request's `tracestate`, if any."""

    at: int
    tracestate: str


class SpanUnseen(NamedTuple):
    """The id of the request's span was never read and never will be, so the span has no children."""

    at: int


class StepsUnrecorded(NamedTuple):
    """Steps of the request are not recorded, because there was no room for another step ring."""

    at: int


BATCH_KEYS = (semconv.BATCH_REQUESTS,)
"""The attribute that `BatchFormed` stands for."""
PLACE_KEYS = (semconv.EXECUTION_PROVIDER,)
"""The attribute that `ModelPlaced` stands for."""
OPERATION_KEYS = semconv.OPERATION_NAME, semconv.PROVIDER_NAME, semconv.REQUEST_MODEL
"""The attributes that `OperationNamed` stands for, in the order of its fields."""

REQUEST_EVENTS = (
    RequestArrived, StageEnded, BytesMoved, CacheHeld, RequestSubmitted, RequestReceived, RequestScheduled,
    RequestPreempted, PrefixRead, TokensDrafted, TokenReached, FirstTokenSent, ResponseStarted, EngineFinished,
    RequestEnded, AttributeSet, OperationNamed, ModelPlaced, SpanEventAdded, SpanLinked, LinkDescribed, NameUpdated,
    StateCarried, SpanUnseen, StepsUnrecorded, BatchFormed,
)  # fmt: skip
"""The types that this module defines."""
