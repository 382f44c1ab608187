"""Events of the protocol by which a request came: HTTP, or a remote procedure call. And the attributes of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.ringbuffer.events.requests import OTHER


class ExchangeEnded(NamedTuple):
    """End of an HTTP request with its HTTP details, in one cell. It exists in rings only; `expand` splits it.

    `http`: a value of `HTTP_CODES`, plus `SINGLE_CHUNK`.
    """

    at: int
    outcome: int
    error_type: str
    status_code: int
    chunks: int
    send_wait_ns: int
    detokenize_ns: int
    route: str
    http: int


class CallServed(NamedTuple):
    """A remote procedure call is over: its system, method, and the status code that its client gets, as `RPC_KEYS`."""

    at: int
    system: str
    method: str
    status: str


class HttpServed(NamedTuple):
    """HTTP request that is counted and has no span; the other fields are as in `RequestEnded` and `HttpDescribed`."""

    at: int
    started_at: int
    status_code: int
    error_type: str
    method: str
    scheme: str
    route: str


class HttpDescribed(NamedTuple):
    """HTTP details from fixed vocabularies: a known method, scheme, and route template ("" = no route)."""

    at: int
    method: str
    scheme: str
    route: str


UNTRACED_METHODS = ("GET", "HEAD", "OPTIONS", "DELETE", "TRACE", "CONNECT")
"""Methods of requests that infer nothing: they are counted, and have no span."""
METHODS = (OTHER, "POST", "PUT", "PATCH", "QUERY", *UNTRACED_METHODS)
"""Methods that are recorded; `_OTHER` stands for any other."""
SCHEMES = ("", "http", "https")
METHODS_AND_SCHEMES = tuple((method, scheme) for method in METHODS for scheme in SCHEMES)
HTTP_CODES: Mapping[tuple[str, str], int] = {
    pair: 2 * number for number, pair in enumerate(METHODS_AND_SCHEMES, 1)
}
"""Method and scheme as one even number, above 0."""
SINGLE_CHUNK = 1
"""Flag: the response body was one chunk, whose sending started `send_wait_ns` before the end."""


ADDRESS_KEYS = semconv.SERVER_ADDRESS, semconv.SERVER_PORT
"""Attributes of the server span of an HTTP request: where it was received."""
HTTP_KEYS = semconv.HTTP_REQUEST_METHOD, semconv.URL_SCHEME, semconv.HTTP_ROUTE
RPC_KEYS = semconv.RPC_SYSTEM_NAME, semconv.RPC_METHOD, semconv.RPC_RESPONSE_STATUS_CODE
"""Attributes that `HttpDescribed` and `CallServed` stand for, in the order of their fields."""
MESSAGING_KEYS = (
    semconv.MESSAGING_SYSTEM, semconv.MESSAGING_DESTINATION, semconv.MESSAGING_MESSAGE_ID,
    semconv.MESSAGING_OPERATION_NAME, semconv.MESSAGING_OPERATION_TYPE,
)  # fmt: skip
PROCESS = semconv.MESSAGING_PROCESS
"""Attributes of the consumer span of a job, and the value of the last two."""

EXCHANGE_EVENTS = (ExchangeEnded, CallServed, HttpServed, HttpDescribed)
"""The types that this module defines."""
