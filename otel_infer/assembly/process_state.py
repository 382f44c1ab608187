"""Stores the latest state of each process: active hooks, requests that its scheduler holds back, HTTP requests
without a span, its end, and who uses its CPUs. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from otel_infer import semconv
from otel_infer.ringbuffer import events

SERVER_ROLE = "server"
"""The role of a process that receives requests; others are started by it."""
_TEMPLATE_MARKS = frozenset("{<([*:?+|^$\\")
"""Characters of a route that stand for a part of the path, which the client writes."""
MAX_CPU_READINGS = 7200
"""Readings that are remembered, one per second."""


class ProcessState:
    """State by the ring of a process. `hooks`: (active, total) of each integration."""

    def __init__(self) -> None:
        self.hooks: dict[tuple[int, str], tuple[int, int]] = {}
        self._waiting: dict[tuple[int, str], int] = {}
        self._untraced: list[events.HttpServed] = []
        self.cpu_usage: deque[events.CpuSeen] = deque(maxlen=MAX_CPU_READINGS)
        self.hang: events.HangSeen | None = None
        """Since when the server hangs; None while it does not."""
        self._has_left: dict[int, bool] = {}
        self._last_left = False
        self._addresses: dict[int, tuple[str, int]] = {}
        self.stop_requested = False
        """Whether `otel-infer run` received a signal to stop the server."""

    def add_process(self, ring: int, role: str) -> None:
        """Adds a process; the end of the server depends on processes of the role `server` only."""
        if role == SERVER_ROLE:
            self._has_left[ring] = False

    def set_left(self, ring: int, event: events.ProcessLeft) -> None:
        """Records the exit of a process; it is orderly without an uncaught exception."""
        if ring in self._has_left:
            self._has_left[ring] = not event.error_type

    def is_server_stopped(self) -> bool:
        """Returns whether all processes have left orderly; of those that are gone, the last one decides.

        A process that reads its own events is never gone.
        """
        if self._has_left:
            return all(self._has_left.values())
        return self._last_left or self.stop_requested

    def set_address(self, ring: int, handle: int, event: events.ServerBound) -> None:
        """Sets the address on which a process receives HTTP requests."""
        self._addresses[ring] = event.address, event.port

    def describe_target(self, ring: int, attributes: dict[str, Any]) -> None:
        """Adds path and address to the attributes of an HTTP request, as far as they are known without its client's text.

        Where the route has no parameter, the path is the route.
        """
        if semconv.HTTP_REQUEST_METHOD not in attributes:
            return
        route = attributes.get(semconv.HTTP_ROUTE, "")
        if route and not _TEMPLATE_MARKS.intersection(route):
            attributes[semconv.URL_PATH] = route
        address = self._addresses.get(ring)
        if address is not None and semconv.SERVER_ADDRESS not in attributes:
            attributes[semconv.SERVER_ADDRESS], attributes[semconv.SERVER_PORT] = address

    def set_hooks(self, ring: int, handle: int, event: events.HooksReported) -> None:
        """Sets the number of hooks of one integration."""
        self.hooks[ring, event.integration] = (event.active, event.total)

    def set_waiting(self, ring: int, handle: int, event: events.WaitingSeen) -> None:
        """Sets how many requests wait for one reason."""
        self._waiting[ring, event.reason] = event.requests

    def count_waiting(self) -> Counter[str]:
        """Returns how many requests wait, by reason. A reason that occurred once stays, with 0."""
        counts = Counter[str]()
        for (_, reason), requests in self._waiting.items():
            counts[reason] += requests
        return counts

    def add_cpu_usage(self, ring: int, handle: int, event: events.CpuSeen) -> None:
        """Adds a reading of who uses the CPUs."""
        self.cpu_usage.append(event)

    def set_hang(self, ring: int, handle: int, event: events.HangSeen) -> None:
        """Sets whether the server hangs."""
        self.hang = event if event.requests else None

    def add_untraced(self, event: events.HttpServed) -> None:
        """Adds an HTTP request that has no span."""
        self._untraced.append(event)

    def drain_untraced(self) -> list[events.HttpServed]:
        """Returns the HTTP requests without a span since the last call."""
        untraced, self._untraced = self._untraced, []
        return untraced

    def remove_process(self, ring: int) -> None:
        """Removes a process."""
        if ring in self._has_left:
            self._last_left = self._has_left.pop(ring)
        self._addresses.pop(ring, None)
        tables: tuple[dict[Any, Any], ...] = (self.hooks, self._waiting)
        for table in tables:
            for key in [key for key in table if key[0] == ring]:
                del table[key]
