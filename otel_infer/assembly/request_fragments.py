"""Requests that are in several processes: one of them opened it, in the others it is a part under a handle of theirs. Pure.

A part says whose it is by the span id. It may be told before the request is, where facts were lost; then it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otel_infer.assembly.requests.conclude import Request

MOST_WAITING = 4096
"""Parts whose request is not known; of more, the oldest are forgotten."""

Key = tuple[int, int]


class Parts:
    """The parts by (ring, handle), while their requests are open."""

    def __init__(self) -> None:
        self._requests: dict[bytes, Request] = {}
        self._parts: dict[Key, Request] = {}
        self._waiting: dict[Key, bytes] = {}

    def get(self, key: Key) -> Request | None:
        """Whose part has this handle."""
        return self._parts.get(key)

    def of(self, ring: int) -> list[Request]:
        """Whose parts are in this process."""
        return [request for (process, _), request in self._parts.items() if process == ring]

    def arrived(self, request: Request) -> None:
        """A request is open."""
        span_id = request.arrived.span_id
        self._requests[span_id] = request
        if self._waiting:
            for key in [key for key, whose in self._waiting.items() if whose == span_id]:
                del self._waiting[key]
                self._add(key, request)

    def join(self, key: Key, span_id: bytes) -> Request | None:
        """A part of the request with this span id; None while that is not known."""
        request = self._requests.get(span_id)
        if request is not None:
            self._add(key, request)
        else:
            if len(self._waiting) >= MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[key] = span_id
        return request

    def left(self, request: Request) -> None:
        """Nothing more is to come of this request."""
        if self._requests.get(request.arrived.span_id) is request:
            del self._requests[request.arrived.span_id]
        for key in request.parts:
            self._parts.pop(key, None)

    def died(self, ring: int) -> None:
        """The process is gone; its parts' requests go on where they were opened."""
        for known in (self._parts, self._waiting):
            for key in [key for key in known if key[0] == ring]:
                del known[key]

    def _add(self, key: Key, request: Request) -> None:
        self._parts[key] = request
        request.parts.append(key)
