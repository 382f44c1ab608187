"""Records the stage `accept`: how long a request waited in its socket until the server called the application.

    bytes arrive in the kernel ── the process is busy, or its event loop is blocked ──▶ the server reads and calls

The kernel reports the time since the last bytes of a connection arrived (`tcpi_last_data_recv` of Linux's TCP_INFO,
see tcp(7)), also for a connection that waited in the listen backlog. It counts in ticks of its clock, 4 ms on most
systems, so a wait is known to one tick. Waits under two ticks are not recorded. It is unknown for Unix sockets. A request
that arrived in several parts waited from the last of them on.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.tracing.request_span import RequestSpan

MIN_WAIT_NS = 8_000_000
"""Two ticks of a kernel with 250 Hz."""
_LAST_DATA_RECV = struct.Struct("52x I")
"""`struct tcp_info` of linux/tcp.h: 8 bytes of flags, then fields of 4 bytes; this one is the twelfth."""


def record_socket_wait(request: RequestSpan, connection: Any, called_at: int, now: int) -> None:
    """Records how long the request had waited when the server called the application at `called_at`.

    `connection`: its socket, or None. `now`: the instant of this call; both are monotonic ns.
    """
    waited = read_socket_wait(connection) - (now - called_at)
    if waited >= MIN_WAIT_NS:
        request.record_event(events.StageEnded(called_at, called_at - waited, events.ACCEPT, 0))


def read_socket_wait(connection: Any) -> int:
    """Returns the time since the last bytes of this connection arrived, ns; 0 = unknown."""
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


if native is not None:
    native.configure_socket_wait(events.ACCEPT, MIN_WAIT_NS)
