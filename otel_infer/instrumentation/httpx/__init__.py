"""The other end of a request: what the reader felt, in the trace of the server that answered.

    from otel_infer.instrumentation.httpx import instrument_client

    client = instrument_client(httpx.Client())          # or httpx.AsyncClient(), or those of httpx2
    openai = OpenAI(http_client=instrument_client(DefaultHttpxClient()))

Every request gets a CLIENT span of your own tracer provider, from the call to the last byte, and its context goes along in
the headers, so that the server's spans hang below it. What the span says beside the HTTP conventions is named in
`otel_infer.semconv` as `CLIENT_*`. It says nothing of bodies, headers, queries or exception messages.

The span is made by a transport around the client's own, since that is the one place through which every request comes,
with each hop of a redirect and each retry by itself, whatever it is that goes wrong, and where the body is still as it
came: event hooks of httpx are not told of failures, and `send` returns when a body that is not streamed has been read.
Where you make the client, give it the transport yourself, which is all public API:

    httpx.Client(transport=TracedTransport(httpx.HTTPTransport()))

A client that exists has no public place for it, so `instrument_client` looks whether the private one is as we know it and
refuses if it is not. Nothing of httpx is imported here: transports are what they do, and the body of a response is of
whatever class its library wants.
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
    "instrument_client takes a Client or an AsyncClient of httpx or httpx2 (pip install 'otel-infer[client]'), such as you "
    "give to OpenAI(http_client=…)"
)
UNSUPPORTED_HTTPX = (
    "this release of httpx keeps its transports elsewhere; make the client with transport=TracedTransport(…)"
)


def instrument_client(client: C, tracer_provider: trace.TracerProvider | None = None) -> C:
    """Has every request of this client traced, and gives it back; a second call changes nothing.

    `tracer_provider`: whose spans they are; by default the global one, which may also be set later. Raises TypeError for
    what is no client of httpx or httpx2, or one of a release that keeps its transports elsewhere.
    """
    asynchronous = hasattr(client, "aclose")
    call = "handle_async_request" if asynchronous else "handle_request"
    if not (asynchronous or hasattr(client, "close")) or not hasattr(client, "event_hooks"):
        raise TypeError(f"{NOT_A_CLIENT}; this is a {type(client).__qualname__}")
    held: Any = client
    main, mounts = getattr(client, "_transport", None), getattr(client, "_mounts", None)
    if not isinstance(mounts, dict):
        raise TypeError(UNSUPPORTED_HTTPX)
    if not all(hasattr(inner, call) for inner in (main, *filter(None, mounts.values()))):
        raise TypeError(UNSUPPORTED_HTTPX)
    around: Any = AsyncTracedTransport if asynchronous else TracedTransport

    def wrap_transport(inner: Any) -> Any:
        return inner if inner is None or isinstance(inner, around) else around(inner, tracer_provider)

    held._mounts = {pattern: wrap_transport(inner) for pattern, inner in mounts.items()}
    held._transport = wrap_transport(main)
    return client


def _get_tracer(provider: trace.TracerProvider | None) -> trace.Tracer:
    return trace.get_tracer(f"{semconv.SCOPE}.client", VERSION, provider, semconv.SCHEMA_URL)


class TracedTransport(BaseTransport):
    """A transport of `httpx.Client` (`inner`) whose requests are CLIENT spans."""

    def __init__(self, inner: BaseTransport, tracer_provider: trace.TracerProvider | None = None) -> None:
        self.inner, self._tracer = inner, _get_tracer(tracer_provider)

    def handle_request(self, request: Request) -> Response:
        """What `inner` answers, its exceptions too."""
        felt = start_client_span(self._tracer, request)
        if felt is None:
            return self.inner.handle_request(request)
        token = otel_context.attach(felt.context)
        try:
            response = self.inner.handle_request(request)
        except BaseException as exc:
            felt.end(exc)
            raise
        finally:
            otel_context.detach(token)
        return _trace_response(response, felt, _TracedBody, "SyncByteStream")

    def close(self) -> None:
        """Closes `inner`."""
        self.inner.close()

    def __enter__(self) -> TracedTransport:
        self.inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.inner.__exit__(*raised)


class AsyncTracedTransport(AsyncBaseTransport):
    """A transport of `httpx.AsyncClient` (`inner`) whose requests are CLIENT spans."""

    def __init__(
        self, inner: AsyncBaseTransport, tracer_provider: trace.TracerProvider | None = None
    ) -> None:
        self.inner, self._tracer = inner, _get_tracer(tracer_provider)

    async def handle_async_request(self, request: Request) -> Response:
        """What `inner` answers, its exceptions too."""
        felt = start_client_span(self._tracer, request)
        if felt is None:
            return await self.inner.handle_async_request(request)
        token = otel_context.attach(felt.context)
        try:
            response = await self.inner.handle_async_request(request)
        except BaseException as exc:
            felt.end(exc)
            raise
        finally:
            otel_context.detach(token)
        return _trace_response(response, felt, _AsyncTracedBody, "AsyncByteStream")

    async def aclose(self) -> None:
        """Closes `inner`."""
        await self.inner.aclose()

    async def __aenter__(self) -> AsyncTracedTransport:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self.inner.__aexit__(*raised)


# ── the body ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _trace_response(
    response: Response, felt: ClientRequestSpan, body: type[_TracedBody | _AsyncTracedBody], base: str
) -> Response:
    """The response; its body is watched, unless it has been read already (a mock's, a cache's)."""
    felt.record_response(response)
    try:
        if response.is_closed:
            felt.end()
        else:
            response.stream = _make_body_class(type(response.stream), body, base)(response.stream, felt)
    except Exception as exc:
        felt.abort_span(exc)
    return response


_body_classes: dict[tuple[type, type], Any] = {}


def _make_body_class(stream: type, body: type[_TracedBody | _AsyncTracedBody], base: str) -> Any:
    """A body that is also what this stream's library asks for: httpx and its successor have a class each."""
    found = _body_classes.get((stream, body))
    if found is None:
        wanted = next(parent for parent in stream.__mro__ if parent.__name__ == base)
        found = _body_classes[stream, body] = type("TracedBody", (body, wanted), {})
    return found


class _TracedBody:
    """A body that is read. No generator: one more of those would be one more that has to be closed."""

    def __init__(self, inner: Any, felt: ClientRequestSpan) -> None:
        self._inner, self._span = inner, felt

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
    def __init__(self, inner: Iterator[bytes], felt: ClientRequestSpan) -> None:
        self._next, self._span = inner.__next__, felt

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
    """As `_Body`, for those who wait."""

    def __init__(self, inner: Any, felt: ClientRequestSpan) -> None:
        self._inner, self._span = inner, felt

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
    def __init__(self, inner: AsyncIterator[bytes], felt: ClientRequestSpan) -> None:
        self._next, self._span = inner.__anext__, felt

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
