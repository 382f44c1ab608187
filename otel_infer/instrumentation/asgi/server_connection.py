"""Hooks on uvicorn's and hypercorn's connections, so that the chunks of a stream pass without a frame of ours.

    uvicorn    on_response ─▶ last byte     FlowControl.drain ─▶ slow reader     connection_lost ─▶ the client left
    hypercorn  HTTPStream.handle ─▶ last byte, the client left    pause_writing, resume_writing (asyncio's streams) ─▶ slow reader

None of them is called per chunk: a server drains, and a transport pauses, only while a client reads slowly.
Where they are not installed, each `send` of the application is timed instead, at about 1 µs per chunk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from otel_infer import _clock
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import start
from otel_infer.tracing.request_span import RequestSpan

_HTTP = "uvicorn.protocols.http"
H11, HTTPTOOLS, FLOW_CONTROL = f"{_HTTP}.h11_impl", f"{_HTTP}.httptools_impl", f"{_HTTP}.flow_control"
HYPERCORN, STREAMS = "hypercorn.protocol.http_stream", "asyncio.streams"
FLOWS = {H11: FLOW_CONTROL, HTTPTOOLS: FLOW_CONTROL}
"""For each of uvicorn's HTTP implementations: the module whose hook reports slow readers."""

_hooks: dict[str, Hook] = {}


class DirectResponse(Protocol):
    """A response whose chunks the application hands to the server directly.

    `on_response`: what the server called at the last byte before `end_response` took its place. `is_direct`: chunks have
    passed.
    """

    on_response: Callable[[], None] | None
    is_direct: bool

    def end_response(self) -> None:
        """Closes the request, whose last byte was written, and calls `on_response`."""

    def record_disconnect(self, at: int) -> None:
        """Stores when the client left."""

    def record_last_byte(self, at: int) -> None:
        """Closes the request: its last byte was written at `at`."""


class NoConnection:
    """Stands for a server that does not report whether its client is still connected."""

    disconnected = False


UNKNOWN_CONNECTION = NoConnection()


def follow_connection(cycle: Any, response: DirectResponse) -> bool:
    """Reports the last byte and a disconnect of this uvicorn cycle to `response`.

    Returns False if the hooks on this server are not installed.
    """
    if not can_follow(cycle):
        return False
    response.on_response = getattr(cycle, "on_response", None)
    if response.on_response is None:  # another release of uvicorn
        return False
    # The reference cycle ends with the response.
    cycle.otel_infer_response, cycle.on_response = response, response.end_response
    return True


def can_follow(cycle: Any) -> bool:
    """Returns whether the hooks on the server of this uvicorn cycle are installed and work."""
    module = type(cycle).__module__
    hook, flow = _hooks.get(module), _hooks.get(FLOWS.get(module, ""))
    return hook is not None and flow is not None and hook.alive and flow.alive


def follow_stream(send: Callable[..., Any], response: DirectResponse) -> bool:
    """Reports the last byte and a disconnect of this hypercorn stream to `response`, until `unfollow_stream`.

    Returns False if the hooks on this server are not installed.
    """
    stream = getattr(send, "__self__", None)
    hook, flow = _hooks.get(type(stream).__module__), _hooks.get(STREAMS)
    if (
        type(stream).__module__ != HYPERCORN
        or hook is None
        or flow is None
        or not (hook.alive and flow.alive)
    ):
        return False
    stream.otel_infer_response = response  # type: ignore[union-attr]
    return True


def unfollow_stream(send: Callable[..., Any], response: DirectResponse) -> None:
    """Ends `follow_stream`, also where it returned False."""
    if is_stream_followed(send, response):
        send.__self__.otel_infer_response = None  # type: ignore[attr-defined]


def is_stream_followed(send: Callable[..., Any], response: DirectResponse) -> bool:
    """Returns whether the stream behind this `send` is followed by `response`."""
    return getattr(getattr(send, "__self__", None), "otel_infer_response", None) is response


def register_hooks(instrumentor: Instrumentor) -> None:
    """Registers the hooks. Each module is a part, because uvicorn imports one of its implementations only."""
    for target, wrap in (
        (f"{H11}:H11Protocol.connection_lost", _wrap_connection_lost),
        (f"{HTTPTOOLS}:HttpToolsProtocol.connection_lost", _wrap_connection_lost),
        (f"{FLOW_CONTROL}:FlowControl.drain", _wrap_drain),
        (f"{HYPERCORN}:HTTPStream.handle", _wrap_handle),
        (f"{STREAMS}:FlowControlMixin.pause_writing", _wrap_pause_writing),
        (f"{STREAMS}:FlowControlMixin.resume_writing", _wrap_resume_writing),
    ):
        module = target.partition(":")[0]
        part = f"{module.partition('.')[0]} {module.rpartition('.')[2]}"
        instrumentor.patch_hot_path(target, optional=True, part=part)(_store_hook(module, wrap))


def _store_hook(module: str, wrap: WrapperFactory) -> WrapperFactory:
    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        _hooks[module] = hook
        return wrap(original, hook)

    return make_wrapper


def _wrap_connection_lost(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def connection_lost(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                cycle = self.cycle
                response = getattr(cycle, "otel_infer_response", None)
                if response is not None and not cycle.response_complete:
                    response.record_disconnect(_clock.now())
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, *args, **kwargs)

    return compile_hook("lost connection", native, original, hook, connection_lost)


def _wrap_handle(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    """Returns a wrapper that sees the end of a stream: the response was handed over, or its connection was lost.

    While the application runs, nothing else ends a stream. The application learns of the end after this call.
    """

    def handle(self: Any, event: Any) -> Awaitable[Any]:
        response = getattr(self, "otel_infer_response", None)
        if response is not None and type(event).__name__ == "StreamClosed" and hook.alive:
            try:
                if self.state.name != "CLOSED":
                    response.record_disconnect(_clock.now())
                elif response.is_direct:
                    response.record_last_byte(_clock.now())
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, event)

    return handle


# ── slow readers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _wrap_drain(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    async def drain(self: Any) -> Any:
        request = start.find_request() if hook.alive else None
        if not isinstance(request, RequestSpan) or not request.sends_directly:
            return await original(self)
        began_at = _clock.now()
        try:
            return await original(self)
        finally:
            request.send_wait_ns += _clock.now() - began_at

    return drain


def _wrap_pause_writing(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Stores when a transport paused, and whose write paused it: the transport calls this inside of a write."""

    def pause_writing(self: Any) -> Any:
        if hook.alive:
            try:
                request = start.find_request()
                if isinstance(request, RequestSpan) and request.sends_directly:
                    self.otel_infer_paused = request, _clock.now()
            except Exception as exc:
                hook.count_failure(exc)
        return original(self)

    return pause_writing


def _wrap_resume_writing(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def resume_writing(self: Any) -> Any:
        paused = getattr(self, "otel_infer_paused", None)
        if paused is not None:
            request, paused_at = paused
            self.otel_infer_paused = None
            request.send_wait_ns += _clock.now() - paused_at
        return original(self)

    return resume_writing
