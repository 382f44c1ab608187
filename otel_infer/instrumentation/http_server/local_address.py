"""Records the address on which the server received a request: once for a process, and again only where it differs."""

from __future__ import annotations

from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing.request_span import RequestSpan

MAX_ADDRESS = 100
_MAX_PORT = 65535

Address = tuple[str, int]
"""Host and port."""

_announced: Any = None
_announced_by: Any = None
"""The writer of this process: a forked process has another one."""


def is_announced() -> bool:
    """Returns whether the address of this process was recorded."""
    return _announced_by is recorder.requests


def announce_address(server: Any) -> Any:
    """Returns the address of this process: `server`, if none was recorded before. None without one."""
    global _announced, _announced_by
    if _announced_by is not recorder.requests:
        address = to_address(server)
        if address is None:
            return None
        _announced, _announced_by = address, recorder.requests
        recorder.record_process(events.ServerBound(_clock.now(), *address))
    return _announced


def to_address(server: Any) -> Address | None:
    """Returns host and port of a server's socket, as ASGI and sockets state them; None for another kind of socket.

    A name below `.invalid` is a placeholder (waitress).
    """
    if not isinstance(server, (tuple, list)) or len(server) < 2:
        return None
    host, port = server[:2]
    if (
        not isinstance(host, str)
        or host.endswith(".invalid")
        or not isinstance(port, int)
        or not 0 < port <= _MAX_PORT
    ):
        return None
    return (host, port) if 0 < len(host) <= MAX_ADDRESS else None


def record_address(request: RequestSpan, server: Any) -> None:
    """Records the address of a request, unless it is the one of this process."""
    announced = announce_address(server)
    if server == announced:
        return
    address = to_address(server)
    if address is not None and address != announced:
        host_key, port_key = events.ADDRESS_KEYS
        request.record_attribute(host_key, address[0])
        request.record_attribute(port_key, address[1])
