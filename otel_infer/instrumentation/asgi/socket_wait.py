"""Records the stage `accept`: how long a request waited in its socket until the server called the application.

    bytes arrive in the kernel ── the event loop is blocked, or the process is busy ──▶ the server reads and calls

The kernel reports the time since the last bytes of a connection arrived (`tcpi_last_data_recv` of Linux's TCP_INFO,
see tcp(7)). It counts in ticks of its clock, 4 ms on most systems, so a wait is known to one tick. Waits under two
ticks are not recorded. It is unknown for Unix sockets, for HTTP/2, whose connections carry many requests, and for
servers other than uvicorn and hypercorn. A request that arrived in several parts waited from the last of them on.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.tracing.request_span import RequestSpan

MIN_WAIT_NS = 8_000_000
"""Two ticks of a kernel with 250 Hz."""
_LAST_DATA_RECV = struct.Struct("52x I")
"""`struct tcp_info` of linux/tcp.h: 8 bytes of flags, then fields of 4 bytes; this one is the twelfth."""
_HTTP1_PROTOCOL = "hypercorn.protocol.h11"


def record_socket_wait(request: RequestSpan, send: Callable[..., Any], called_at: int, now: int) -> None:
    """Records how long the request had waited when the server called the application at `called_at`.

    `send`: the server's. `now`: the instant of this call; both are monotonic ns.
    """
    transport = _find_transport(send)
    if transport is not None:
        waited = read_socket_wait(transport) - (now - called_at)
        if waited >= MIN_WAIT_NS:
            request.record_event(events.StageEnded(called_at, called_at - waited, events.ACCEPT, 0))


def read_socket_wait(transport: Any) -> int:
    """Returns the time since the last bytes of this transport's connection arrived, ns; 0 = unknown."""
    connection = transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux":
        return 0
    if native is not None:
        return int(native.read_last_receipt(connection))
    # uvloop's sockets have no `getsockopt`, but a descriptor, which is only borrowed here.
    borrowed = socket.socket(connection.family, connection.type, connection.proto, connection.fileno())
    try:
        known = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
    except OSError:  # not a TCP socket
        return 0
    finally:
        borrowed.detach()
    return int(_LAST_DATA_RECV.unpack(known)[0]) * 1_000_000


def _find_transport(send: Callable[..., Any]) -> Any:
    """Returns the transport of the connection whose `send` this is; None for unknown servers."""
    owner = getattr(send, "__self__", None)
    transport = getattr(owner, "transport", None)  # of uvicorn's cycles
    if transport is None:
        protocol = getattr(getattr(owner, "send", None), "__self__", None)
        if type(protocol).__module__ == _HTTP1_PROTOCOL:
            server = getattr(getattr(protocol, "send", None), "__self__", None)
            transport = getattr(server, "writer", None)
    return transport if hasattr(transport, "get_extra_info") else None


if native is not None:
    native.configure_socket_wait(events.ACCEPT, MIN_WAIT_NS)
