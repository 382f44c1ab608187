"""Requests of a client that has a trace of its own."""

from __future__ import annotations

import http.client
import secrets
from typing import NamedTuple


class Answer(NamedTuple):
    """A client's answer, and the ids that it sent."""

    status: int
    body: bytes
    trace_id: str
    parent_id: str


def make_ids() -> tuple[str, str, str]:
    """Returns a trace id, the id of the client's span, and the `traceparent` that states them."""
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, parent_id, f"00-{trace_id}-{parent_id}-01"


def send(port: int, method: str, path: str, body: bytes = b"x" * 100) -> Answer:
    """Sends a request and returns the whole answer."""
    trace_id, parent_id, header = make_ids()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"traceparent": header, "connection": "close"}
    if body.startswith(b"{"):
        headers["content-type"] = "application/json"
    connection.request(method, path, body if method == "POST" else None, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return Answer(response.status, content, trace_id, parent_id)
