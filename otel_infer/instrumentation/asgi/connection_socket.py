"""Finds the socket of the connection that an ASGI server serves: of uvicorn, and of hypercorn for HTTP/1.1.

HTTP/2 connections carry many requests, so when the bytes of one arrived is unknown there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HTTP1_PROTOCOL = "hypercorn.protocol.h11"


def find_connection_socket(send: Callable[..., Any]) -> Any:
    """Returns the socket of the connection whose `send` this is; None for unknown servers."""
    owner = getattr(send, "__self__", None)
    transport: Any = getattr(owner, "transport", None)  # of uvicorn's cycles
    if transport is None:
        protocol = getattr(getattr(owner, "send", None), "__self__", None)
        if type(protocol).__module__ == _HTTP1_PROTOCOL:
            server = getattr(getattr(protocol, "send", None), "__self__", None)
            transport = getattr(server, "writer", None)
    return transport.get_extra_info("socket") if hasattr(transport, "get_extra_info") else None
