"""Records client-side latency as CLIENT spans, in the same trace as the server's spans.

    import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer.instrumentation.httpx import instrument_client

    client = instrument_client(httpx.Client())          # or httpx.AsyncClient(), or a client of httpx2
    openai = OpenAI(http_client=instrument_client(DefaultHttpxClient()))

Every request gets a CLIENT span of your tracer provider, from the call to the last byte. Its context is sent
in the request headers, so the server's spans are below it. Beside the attributes of the HTTP conventions it
has those named `CLIENT_*` in `otel_infer.semconv`. It contains no bodies, headers, queries or exception
messages.

The span is recorded by a transport around the client's own transport, because every request passes there.
Each redirect hop and each retry is a separate request there, failures are visible, and the body is still as
it was received. Event hooks of httpx are not called on failures, and `send` returns only after a non-streamed
body was read. Where your code creates the client, it can pass the transport itself, which is public API:

    httpx.Client(transport=TracedTransport(httpx.HTTPTransport()))

An existing client has no public attribute for its transport. `instrument_client` therefore checks the private
attributes and raises if they are not as expected. This module does not import httpx: it relies on the methods
of a transport, and takes the class of a response body from the library of the response.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.instrumentation.httpx.client_span import ClientRequestSpan, start_client_span

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport, BaseTransport, Request, Response
else:
    BaseTransport = AsyncBaseTransport = object

__all__ = ["AsyncTracedTransport", "TracedTransport", "instrument_client"]

C = TypeVar("C")

NOT_A_CLIENT = (
    "instrument_client takes a Client or an AsyncClient of httpx or httpx2 "
    "(pip install 'otel-infer[client]'), for example the one for OpenAI(http_client=…)"
)
UNSUPPORTED_HTTPX = (
    "unsupported release of httpx (unexpected private attributes); "
    "create the client with transport=TracedTransport(…)"
)


def instrument_client(client: C, tracer_provider: trace.TracerProvider | None = None) -> C:
    """Wraps the transports of the client, so that its requests are traced, and returns it.

    A second call changes nothing.
    `tracer_provider`: the provider of the spans; None = the global provider, which may also be set later.
    Raises TypeError if `client` is no client of httpx or httpx2, or if its private attributes are unexpected.
    """
    asynchronous = hasattr(client, "aclose")
    call = "handle_async_request" if asynchronous else "handle_request"
    if not (asynchronous or hasattr(client, "close")) or not hasattr(client, "event_hooks"):
        raise TypeError(f"{NOT_A_CLIENT}; got a {type(client).__qualname__}")
    any_client: Any = client
    main, mounts = getattr(client, "_transport", None), getattr(client, "_mounts", None)
    if not isinstance(mounts, dict):
        raise TypeError(UNSUPPORTED_HTTPX)
    if not all(hasattr(inner, call) for inner in (main, *filter(None, mounts.values()))):
        raise TypeError(UNSUPPORTED_HTTPX)
    transport_class: Any = AsyncTracedTransport if asynchronous else TracedTransport

    def wrap_transport(inner: Any) -> Any:
        return (
            inner
            if inner is None or isinstance(inner, transport_class)
            else transport_class(inner, tracer_provider)
        )

    any_client._mounts = {pattern: wrap_transport(inner) for pattern, inner in mounts.items()}
    any_client._transport = wrap_transport(main)
    return client


def _get_tracer(provider: trace.TracerProvider | None) -> trace.Tracer:
    return trace.get_tracer(f"{semconv.SCOPE}.client", VERSION, provider, semconv.SCHEMA_URL)


class TracedTransport(BaseTransport):
    """A transport for `httpx.Client` around `inner`, which records each request as a CLIENT span."""

    def __init__(self, inner: BaseTransport, tracer_provider: trace.TracerProvider | None = None) -> None:
        self.inner, self._tracer = inner, _get_tracer(tracer_provider)

    def handle_request(self, request: Request) -> Response:
        """Returns the response of `inner`, or raises its exception."""
        client_span = start_client_span(self._tracer, request)
        if client_span is None:
            return self.inner.handle_request(request)
        token = otel_context.attach(client_span.context)
        try:
            response = self.inner.handle_request(request)
        except BaseException as exc:
            client_span.end(exc)
            raise
        finally:
            otel_context.detach(token)
        return _trace_response(response, client_span, _TracedBody, "SyncByteStream")

    def close(self) -> None:
        """Closes `inner`."""
        self.inner.close()

    def __enter__(self) -> TracedTransport:
        self.inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.inner.__exit__(*raised)


class AsyncTracedTransport(AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` around `inner`, which records each request as a CLIENT span."""

    def __init__(
        self, inner: AsyncBaseTransport, tracer_provider: trace.TracerProvider | None = None
    ) -> None:
        self.inner, self._tracer = inner, _get_tracer(tracer_provider)

    async def handle_async_request(self, request: Request) -> Response:
        """Returns the response of `inner`, or raises its exception."""
        client_span = start_client_span(self._tracer, request)
        if client_span is None:
            return await self.inner.handle_async_request(request)
        token = otel_context.attach(client_span.context)
        try:
            response = await self.inner.handle_async_request(request)
        except BaseException as exc:
            client_span.end(exc)
            raise
        finally:
            otel_context.detach(token)
        return _trace_response(response, client_span, _AsyncTracedBody, "AsyncByteStream")

    async def aclose(self) -> None:
        """Closes `inner`."""
        await self.inner.aclose()

    async def __aenter__(self) -> AsyncTracedTransport:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.inner.__aexit__(*raised)


# ── response body ─────────────────────────────────────────────────────────────────────────────────────────────


def _trace_response(
    response: Response, client_span: ClientRequestSpan, body: type[_TracedBody | _AsyncTracedBody], base: str
) -> Response:
    """Returns the response with a traced body. Ends the span if the body was read already (mock, cache)."""
    client_span.record_response(response)
    try:
        if response.is_closed:
            client_span.end()
        else:
            response.stream = _make_body_class(type(response.stream), body, base)(
                response.stream, client_span
            )
    except Exception as exc:
        client_span.abort_span(exc)
    return response


_body_classes: dict[tuple[type, type], Any] = {}


def _make_body_class(stream: type, body: type[_TracedBody | _AsyncTracedBody], base: str) -> Any:
    """Returns a subclass of `body` and of the stream base class of the response's library.

    httpx and httpx2 each check for their own base class, found here by the name `base`.
    """
    base_class = next(parent for parent in stream.__mro__ if parent.__name__ == base)
    body_class = _body_classes.get((base_class, body))
    if body_class is None:  # two for each library, however many classes of streams there are
        body_class = _body_classes[base_class, body] = type("TracedBody", (body, base_class), {})
    return body_class


class _TracedBody:
    """A synchronous response body; not a generator, because that would need to be closed as well."""

    def __init__(self, inner: Any, client_span: ClientRequestSpan) -> None:
        self._inner, self._span = inner, client_span

    def __iter__(self) -> Iterator[bytes]:
        return _TracedChunks(iter(self._inner), self._span)

    def close(self) -> None:
        try:
            self._inner.close()
        except BaseException as exc:
            self._span.end(exc)
            raise
        self._span.close()


class _TracedChunks:
    def __init__(self, inner: Iterator[bytes], client_span: ClientRequestSpan) -> None:
        self._next, self._span = inner.__next__, client_span

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = self._next()
        except StopIteration:
            self._span.end()
            raise
        except BaseException as exc:
            self._span.end(exc)
            raise
        self._span.record_chunk(chunk)
        return chunk


class _AsyncTracedBody:
    """An asynchronous response body; see `_TracedBody`."""

    def __init__(self, inner: Any, client_span: ClientRequestSpan) -> None:
        self._inner, self._span = inner, client_span

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _AsyncTracedChunks(self._inner.__aiter__(), self._span)

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        except BaseException as exc:
            self._span.end(exc)
            raise
        self._span.close()


class _AsyncTracedChunks:
    def __init__(self, inner: AsyncIterator[bytes], client_span: ClientRequestSpan) -> None:
        self._next, self._span = inner.__anext__, client_span

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._next()
        except StopAsyncIteration:
            self._span.end()
            raise
        except BaseException as exc:
            self._span.end(exc)
            raise
        self._span.record_chunk(chunk)
        return chunk
