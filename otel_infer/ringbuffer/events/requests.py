"""What an integration may state: one class per fact, named noun + past verb, and its layout in shared memory.

The writer (`ring.write`, `ring.write_steps`) packs these layouts, the reader (`ring.read`) unpacks them, the assembler
consumes them; nobody else knows a byte. `at` is always the instant the fact is about, monotonic ns, and facts are ordered
by it.

Two families:

* request facts name one request by its `handle` (a slot of the live table and its generation, u32; 0 = unknown) and
  travel in fixed 64-byte cells of the request ring;
* step facts describe one engine step and its whole batch and travel as variable-length records of a step ring.

Long, since it is one table: a fact and its layout are read side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

Value = Union[str, bool, int, float, Sequence[str], Sequence[bool], Sequence[int], Sequence[float]]
"""What OpenTelemetry allows as an attribute value."""

NONE = 0
"""String id of "not said"."""
OTHER = "_OTHER"
"""What stands for a string when the string table is full (the word of the OpenTelemetry conventions)."""

# Flags of RequestArrived.
SAMPLED = 1
REMOTE_PARENT = 2
OWN_SERVER_SPAN = 4
NON_GENERATIVE = 8
JOINED = 16
"""What arrives is a part of a request that arrived in another process, whose trace id and span id these are."""
TORCH = "torch"
"""The provider of models that no engine claims: named after their class, never by a caller."""

# Outcomes of RequestEnded.
OK = 0
ERROR = 1
ABORTED = 2


class RequestArrived(NamedTuple):
    """A request began; `wall_at` (unix ns) pairs with `at`. Ids are zero bytes where there is none."""

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


class StageEnded(NamedTuple):
    """A named interval of a request, stated when it is over."""

    at: int
    started_at: int
    stage: str
    items: int


PINNED_UNKNOWN = 2


class BytesMoved(NamedTuple):
    """A stage that moved so many bytes to a device or from it, stated when it is over. `pinned`: whether the host's side of them
    was page-locked, 0 or 1, or `PINNED_UNKNOWN`."""

    at: int
    started_at: int
    stage: str
    size: int
    pinned: int


class CacheHeld(NamedTuple):
    """The request's own KV cache, which is nobody else's, took so many bytes."""

    at: int
    size: int


class RequestSubmitted(NamedTuple):
    """Handed over to the engine. `input_tokens`, `max_tokens`: 0 = not known. `sequences`: 0 = more of the same prompt."""

    at: int
    sequences: int
    input_tokens: int
    max_tokens: int
    engine: str


class RequestReceived(NamedTuple):
    """The engine's scheduler saw the request: what came before was a hidden queue."""

    at: int


class RequestScheduled(NamedTuple):
    """First scheduled, for engines whose steps are not recorded. With a step log this follows from the steps."""

    at: int


class RequestPreempted(NamedTuple):
    """Put back into the queue to free KV blocks. `kind`: `offload` (KV kept elsewhere) or `recompute`."""

    at: int
    kind: str


class PrefixRead(NamedTuple):
    """A prompt of so many tokens was looked up in the engine's prefix cache, and so many of them were there."""

    at: int
    tokens: int
    cached: int


class TokensDrafted(NamedTuple):
    """What was guessed ahead for a sequence while it was in the engine (speculative decoding), and how much was right."""

    at: int
    drafted: int
    accepted: int


class TokenReached(NamedTuple):
    """The first token reached the part of the server that talks to the reader (`at`), nearer to them than the step."""

    at: int


class FirstTokenSent(NamedTuple):
    """The first chunk with a token in it is about to be handed to the socket."""

    at: int


class ResponseStarted(NamedTuple):
    """The first byte of the response body is about to be handed to the socket."""

    at: int


class EngineFinished(NamedTuple):
    """The engine is done with one sequence. `reason`: stop, length, abort, error. Tokens: 0 = take them from steps."""

    at: int
    reason: str
    output_tokens: int


class RequestEnded(NamedTuple):
    """The last byte was handed over, or the request died. Lengths in ns; `status_code` 0 = no HTTP."""

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int


class ExchangeEnded(NamedTuple):
    """The end of an HTTP request with what else is known of it by then, in one cell: for the ring alone, `told_apart` by its
    reader. `http`: of `HTTP`, how it was asked for; and `WHOLE`."""

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int
    route: str
    http: int


class AttributeSet(NamedTuple):
    """User code set an attribute on the live request span (limits already honoured)."""

    at: int
    key: str
    value: Value


class SpanEventAdded(NamedTuple):
    """User code added an event to the live request span."""

    at: int
    name: str
    attributes: Mapping[str, Value]


class SpanLinked(NamedTuple):
    """User code linked the live request span to another."""

    at: int
    trace_id: bytes
    span_id: bytes


class LinkDescribed(NamedTuple):
    """User code said so of the link that it has just added, to the span with this id (hex)."""

    at: int
    span_id: str
    attributes: Mapping[str, Value]


class NameUpdated(NamedTuple):
    """User code renamed the live request span."""

    at: int
    name: str


class StateCarried(NamedTuple):
    """What the `tracestate` of the request says of its sampling, if anything."""

    at: int
    tracestate: str


class SpanUnseen(NamedTuple):
    """Nobody was told the id of the request's span, and nobody will be: nothing can hang from it."""

    at: int


class HttpDescribed(NamedTuple):
    """What an HTTP request is, in words of ours: a known method, the scheme, the route's template ("" = no route)."""

    at: int
    method: str
    scheme: str
    route: str


METHODS = (OTHER, "POST", "PUT", "PATCH", "QUERY")
"""Of the requests that are watched."""
SCHEMES = ("", "http", "https")
_METHODS_AND_SCHEMES = tuple((method, scheme) for method in METHODS for scheme in SCHEMES)
HTTP_CODES: Mapping[tuple[str, str], int] = {
    asked: 2 * number for number, asked in enumerate(_METHODS_AND_SCHEMES, 1)
}
"""Method and scheme as one number."""
SINGLE_CHUNK = 1
"""The body of the response was one piece: it was started `send_wait_ns` before the end."""
