"""Records the stage `accept`: how long a request waited in its socket until the server called the application.

    bytes arrive in the kernel ── the process is busy, or its event loop is blocked ──▶ the server reads and calls

The kernel reports the time since the last bytes of a connection arrived (`tcpi_last_data_recv` of Linux's TCP_INFO,
see tcp(7)), also for a connection that waited in the listen backlog. It counts ticks of its clock, of 4 ms on most
systems. When they are is found out once, with a socket that is connected with itself. So the bytes arrived between two known
ticks:

    ──┬───────arrived───────┬───────────────┬──────called──▶     `tcpi_last_data_recv` = 2 ticks
      └ at the earliest     └ at the latest └ last tick

The middle is recorded, which is at most half a tick off, if the wait took 1 ms or more for certain. It is unknown for
Unix sockets. A request that arrived in several parts waited from the last of them on.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.tracing.request_span import RequestSpan

MIN_WAIT_NS = 1_000_000
_COARSE_CLOCK = 6
"""CLOCK_MONOTONIC_COARSE of linux/time.h, whose resolution is a tick."""
_LAST_DATA_RECV = struct.Struct("52x I")
"""`struct tcp_info` of linux/tcp.h: 8 bytes of flags, then fields of 4 bytes; this one is the twelfth."""


def _read_tick() -> int:
    """Returns the length of a tick, ns; 0 = unknown: gVisor's clock has none."""
    try:
        tick = round(time.clock_getres(_COARSE_CLOCK) * 1e9) if sys.platform == "linux" else 0
    except OSError:
        return 0
    return tick if tick >= 1_000_000 else 0


def _read_last_receipt(connection: socket.socket) -> int:
    """Returns how long ago the last bytes arrived, in ms of whole ticks."""
    known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
    return int(_LAST_DATA_RECV.unpack(known)[0])


def find_tick(tick_ns: int) -> int:
    """Returns the instant of a tick, monotonic ns; 0 = unknown. Ticks are equally long, so all others follow.

    Takes about a tick, and three at most.
    """
    if not tick_ns:
        return 0
    try:
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            own.settimeout(0.1)
            own.connect(own.getsockname())  # no other process can connect, because it does not listen
            own.sendall(b"x")
            before = _read_last_receipt(own)
            earliest = _clock.now()
            until = earliest + 3 * tick_ns
            while (now := _clock.now()) < until:
                if _read_last_receipt(own) != before:
                    return earliest  # a tick that is taken to be early makes waits short, not long
                earliest = now
                time.sleep(50e-6)
    except OSError:
        pass
    return 0


TICK_NS = _read_tick()
FIRST_TICK = find_tick(TICK_NS)


def record_socket_wait(request: RequestSpan, connection: Any, called_at: int) -> None:
    """Records how long the request had waited when the server called the application at `called_at`, ns.

    `connection`: its socket, or None.
    """
    waited = estimate_socket_wait(connection, called_at)
    if waited:
        request.record_event(events.StageEnded(called_at, called_at - waited, events.ACCEPT, 0))


def estimate_socket_wait(connection: Any, called_at: int) -> int:
    """Returns how long the last bytes of this connection had waited at `called_at`, ns; 0 = not long, or unknown."""
    if connection is None or not TICK_NS:
        return 0
    if native is not None:
        return int(native.estimate_socket_wait(connection, called_at))
    # uvloop's sockets have no `getsockopt`, but a descriptor, which is only borrowed here.
    borrowed = socket.socket(connection.family, connection.type, connection.proto, connection.fileno())
    try:
        received_ms = _read_last_receipt(borrowed)
    except OSError:  # not a TCP socket
        return 0
    finally:
        borrowed.detach()
    now = _clock.now()
    last_tick = now - (now - FIRST_TICK) % TICK_NS if FIRST_TICK else now
    ticks = (received_ms * 1_000_000 + TICK_NS // 2) // TICK_NS
    shortest = called_at - (last_tick - (ticks - 1) * TICK_NS)
    return shortest + TICK_NS // 2 if ticks and shortest >= MIN_WAIT_NS else 0


if native is not None:
    native.configure_socket_wait(events.ACCEPT, MIN_WAIT_NS, TICK_NS, FIRST_TICK)
