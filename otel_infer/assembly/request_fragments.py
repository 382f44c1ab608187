"""Requests that are in several processes: one of them opened it, in the others it is a part under a handle of theirs. Pure.

A part says whose it is by the span id. It may be told before the request is, where facts were lost; then it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_infer.assembly.requests.conclude import OpenRequest

MAX_WAITING = 4096
"""Parts whose request is not known; of more, the oldest are forgotten."""

Key = tuple[int, int]


class RequestFragments:
    """The parts by (ring, handle), while their requests are open."""

    def __init__(self) -> None:
        self._requests: dict[bytes, OpenRequest] = {}
        self._fragments: dict[Key, OpenRequest] = {}
        self._waiting: dict[Key, bytes] = {}

    def get(self, key: Key) -> OpenRequest | None:
        """Whose part has this handle."""
        return self._fragments.get(key)

    def requests_in(self, ring: int) -> list[OpenRequest]:
        """Whose parts are in this process."""
        return [request for (process, _), request in self._fragments.items() if process == ring]

    def add_request(self, request: OpenRequest) -> None:
        """A request is open."""
        span_id = request.arrived.span_id
        self._requests[span_id] = request
        if self._waiting:
            for key in [key for key, whose in self._waiting.items() if whose == span_id]:
                del self._waiting[key]
                self._add_fragment(key, request)

    def join_request(self, key: Key, span_id: bytes) -> OpenRequest | None:
        """A part of the request with this span id; None while that is not known."""
        request = self._requests.get(span_id)
        if request is not None:
            self._add_fragment(key, request)
        else:
            if len(self._waiting) >= MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[key] = span_id
        return request

    def remove_request(self, request: OpenRequest) -> None:
        """Nothing more is to come of this request."""
        if self._requests.get(request.arrived.span_id) is request:
            del self._requests[request.arrived.span_id]
        for key in request.fragments:
            self._fragments.pop(key, None)

    def remove_process(self, ring: int) -> None:
        """The process is gone; its parts' requests go on where they were opened."""
        for known in (self._fragments, self._waiting):
            for key in [key for key in known if key[0] == ring]:
                del known[key]

    def _add_fragment(self, key: Key, request: OpenRequest) -> None:
        self._fragments[key] = request
        request.fragments.append(key)
