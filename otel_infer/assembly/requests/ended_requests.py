"""The requests that have ended, until they are concluded.

A request is concluded `GRACE_NS` after its end, because another thread may record the step of its last token later. It waits
longer for a sample of its engine's thread: the sidecar reads the thread's counters every 200 ms, but where the cores are
taken it comes late. Without the sample, the delays of the last steps would be unexplained.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from otel_infer.assembly.requests.open_request import OpenRequest

GRACE_NS = 300_000_000
"""How long an ended request waits for events that happened before its end and are read after it."""
MAX_WAIT_NS, AGAIN_NS = 4_000_000_000, 200_000_000
SETTLED_NS = GRACE_NS + MAX_WAIT_NS + AGAIN_NS
"""So long after its end, a request is concluded in any case."""
_NEVER = 1 << 63


class EndedRequests:
    """A queue by the instant when each request is concluded. `due`: the earliest of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, OpenRequest]] = []  # due instant, unique number, request
        self._numbers = itertools.count()
        self.due = _NEVER

    def add(self, request: OpenRequest) -> None:
        """Adds a request that has ended."""
        self._push(request.ended_at + GRACE_NS, request)

    def take_due(self, horizon: int) -> Iterator[tuple[OpenRequest, int]]:
        """Yields the requests that are due by `horizon` (monotonic ns), and when they were. The caller may stop at any one."""
        while self._heap and self.due <= horizon:  # a damaged tape may state any horizon
            due, _, request = heapq.heappop(self._heap)
            self.due = self._heap[0][0] if self._heap else _NEVER
            if due < request.ended_at + MAX_WAIT_NS and _lacks_sample(request):
                self._push(due + AGAIN_NS, request)
            else:
                yield request, due

    def _push(self, due: int, request: OpenRequest) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), request))
        self.due = min(self.due, due)


def _lacks_sample(request: OpenRequest) -> bool:
    """Returns whether a sample of its engine's thread is to come that covers its last step."""
    lasts = [(run.log, run.last) for run in request.runs]
    lasts += [(log, log.table.last) for log in request.current_runs]
    return any(log.baseline.thread_delays.lags_behind(log.table.ended_at(last)) for log, last in lasts)
