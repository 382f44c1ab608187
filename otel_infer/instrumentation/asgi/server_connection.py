"""Hooks on uvicorn's connections, so that the chunks of a stream pass without a frame of ours.

    RequestResponseCycle.send ─▶ on_response            the last byte was written, once per response
                               ─▶ FlowControl.drain     the client reads slowly: called only while writing is paused
    Protocol.connection_lost                            the client left

Where these hooks are not installed, each `send` of the application is timed instead (about 1 µs per chunk).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.ringbuffer.recorder import recorder

_HTTP = "uvicorn.protocols.http"
PROTOCOLS = {
    f"{_HTTP}.h11_impl": "H11Protocol.connection_lost",
    f"{_HTTP}.httptools_impl": "HttpToolsProtocol.connection_lost",
}
"""The function that each of uvicorn's HTTP implementations calls when a connection is closed."""
FLOW_CONTROL = f"{_HTTP}.flow_control"

_hooks: dict[str, Hook] = {}


class DirectResponse(Protocol):
    """A response whose chunks the application hands to the server directly."""

    hook: Hook

    def record_send_wait(self, wait_ns: int) -> None:
        """Adds the time in which the application waited for a slow reader."""

    def record_disconnect(self, at: int) -> None:
        """Stores when the client left."""

    def record_last_byte(self, at: int) -> None:
        """Closes the request: its last byte was written at `at`."""


class NoConnection:
    """Stands for a server that does not report whether its client is still connected."""

    disconnected = False


UNKNOWN_CONNECTION = NoConnection()


def find_connection(send: Callable[..., Any]) -> Any:
    """Returns the server's object that owns `send`, if it reports a disconnected client.

    uvicorn drops messages to a client that has left. Only `receive` and this flag show that.
    """
    owner = getattr(send, "__self__", None)
    if owner is not None and type(getattr(owner, "disconnected", None)) is bool:
        return owner
    return UNKNOWN_CONNECTION


def can_send_directly(connection: Any) -> bool:
    """Returns whether hooks report the end of a response, slow readers and disconnects of this connection."""
    hook, flow = _hooks.get(type(connection).__module__), _hooks.get(FLOW_CONTROL)
    return hook is not None and flow is not None and hook.alive and flow.alive


def follow_response(connection: Any, response: DirectResponse) -> None:
    """Reports the last byte, waits for a slow reader, and a disconnect to `response` from now on.

    Raises AttributeError for a connection of another release; then nothing is changed.
    """
    on_response, flow = connection.on_response, connection.flow

    def end_response() -> None:
        flow.otel_infer_response = connection.otel_infer_response = None
        response.record_last_byte(_clock.now())
        on_response()

    flow.otel_infer_response = connection.otel_infer_response = response
    connection.on_response = end_response


def register_hooks(instrumentor: Instrumentor) -> None:
    """Registers the hooks. Each module is a part, because uvicorn imports one of its implementations only."""
    for module, path in PROTOCOLS.items():
        part = f"uvicorn {module.rpartition('.')[2]}"
        instrumentor.patch_hot_path(f"{module}:{path}", optional=True, part=part)(
            _wrap_connection_lost(module)
        )
    instrumentor.patch_hot_path(
        f"{FLOW_CONTROL}:FlowControl.drain", optional=True, part="uvicorn flow_control"
    )(_wrap_drain)


def _wrap_connection_lost(module: str) -> WrapperFactory:
    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        _hooks[module] = hook

        def connection_lost(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.alive and recorder.active:
                try:
                    cycle = self.cycle
                    response = getattr(cycle, "otel_infer_response", None)
                    if response is not None and not cycle.response_complete:
                        response.record_disconnect(_clock.now())
                except Exception as exc:
                    hook.count_failure(exc)
            return original(self, *args, **kwargs)

        return connection_lost

    return make_wrapper


def _wrap_drain(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    _hooks[FLOW_CONTROL] = hook

    async def drain(self: Any) -> Any:
        response = getattr(self, "otel_infer_response", None)
        if response is None or not hook.alive:
            return await original(self)
        began_at = _clock.now()
        try:
            return await original(self)
        finally:
            response.record_send_wait(_clock.now() - began_at)

    return drain
