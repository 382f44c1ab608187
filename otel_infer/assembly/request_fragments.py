"""Joins the fragments of requests that run in several processes. Pure.

One process opens a request; others hold fragments of it. A fragment has its own handle and the span id of its
request. It may arrive before the request where events were lost; it then waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_infer.assembly.requests.conclude import OpenRequest

MAX_WAITING = 4096
"""Fragments that may wait for their request. Beyond it, the oldest is dropped."""

Key = tuple[int, int]


class RequestFragments:
    """Fragments of open requests, by (ring, handle)."""

    def __init__(self) -> None:
        self._requests: dict[bytes, OpenRequest] = {}
        self._fragments: dict[Key, OpenRequest] = {}
        self._waiting: dict[Key, bytes] = {}

    def get(self, key: Key) -> OpenRequest | None:
        """Returns the request of this fragment; None if it is unknown."""
        return self._fragments.get(key)

    def requests_in(self, ring: int) -> list[OpenRequest]:
        """Returns the requests that have a fragment in this process."""
        return [request for (process, _), request in self._fragments.items() if process == ring]

    def add_request(self, request: OpenRequest) -> None:
        """Adds an open request and joins the fragments that wait for it."""
        span_id = request.arrived.span_id
        self._requests[span_id] = request
        if self._waiting:
            for key in [key for key, waiting_for in self._waiting.items() if waiting_for == span_id]:
                del self._waiting[key]
                self._add_fragment(key, request)

    def join_request(self, key: Key, span_id: bytes) -> OpenRequest | None:
        """Joins a fragment to the request with this span id. Returns the request; None while it is unknown."""
        request = self._requests.get(span_id)
        if request is not None:
            self._add_fragment(key, request)
        else:
            if len(self._waiting) >= MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[key] = span_id
        return request

    def remove_request(self, request: OpenRequest) -> None:
        """Removes a request that is over, with its fragments."""
        if self._requests.get(request.arrived.span_id) is request:
            del self._requests[request.arrived.span_id]
        for key in request.fragments:
            self._fragments.pop(key, None)

    def remove_process(self, ring: int) -> None:
        """Removes the fragments in a process. Their requests continue in the process that opened them."""
        for table in (self._fragments, self._waiting):
            for key in [key for key in table if key[0] == ring]:
                del table[key]

    def _add_fragment(self, key: Key, request: OpenRequest) -> None:
        self._fragments[key] = request
        request.fragments.append(key)
