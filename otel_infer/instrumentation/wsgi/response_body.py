"""Follows the body of a WSGI response: its chunks, its end, and a server that stops reading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.wsgi.exchange import Environ, WsgiExchange


def wrap_body(body: Any, exchange: WsgiExchange, environ: Environ) -> Any:
    """Returns the body to be given to the server, which ends the request.

    A file that the server sends by itself is returned unchanged; then the request ends here.
    """
    file_wrapper = environ.get("wsgi.file_wrapper")
    if isinstance(file_wrapper, type) and isinstance(body, file_wrapper):
        exchange.completed_at = _clock.now()
        exchange.end()
        return body
    return SizedResponseBody(body, exchange) if hasattr(body, "__len__") else ResponseBody(body, exchange)


class ResponseBody:
    """The body of an application. Each chunk is computed in the context of its request, up to the announced length.

    The server writes a chunk before it asks for the next one, so the time between is its wait for the client.
    """

    def __init__(self, body: Any, exchange: WsgiExchange) -> None:
        self._body, self._exchange = body, exchange
        self._chunks: Iterator[Any] | None = None
        self._yielded_at = self._yielded = 0

    def __iter__(self) -> ResponseBody:
        return self

    def __next__(self) -> Any:
        exchange, request = self._exchange, self._exchange.request
        if self._yielded_at and request is not None:
            request.send_wait_ns += _clock.now() - self._yielded_at
        try:
            if self._chunks is None:
                chunk = exchange.call(self._begin)
            elif (
                0 < exchange.announced_length <= self._yielded
            ):  # only the end is left, which no model computes
                chunk = next(self._chunks)
            else:
                chunk = exchange.call(next, self._chunks)
        except StopIteration:
            exchange.completed_at = _clock.now()
            exchange.end()
            raise
        except BaseException as exc:
            exchange.end(exc)
            raise
        self._yielded_at = _clock.now()
        self._yielded += len(chunk) if isinstance(chunk, bytes) else 0
        exchange.record_chunk(chunk, self._yielded_at)
        return chunk

    def _begin(self) -> Any:
        """Returns the first chunk."""
        self._chunks = iter(self._body)
        return next(self._chunks)

    def close(self) -> None:
        """Closes the application's body. Where it was not read to its end, the client has left."""
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._exchange.end()


class SizedResponseBody(ResponseBody):
    """A body with a number of chunks, from which servers know the length of a single one."""

    def __len__(self) -> int:
        return len(self._body)
