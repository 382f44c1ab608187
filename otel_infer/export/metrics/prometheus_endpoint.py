"""`GET /metrics`, for Prometheus: what is counted, as of now, with exemplars for who accepts OpenMetrics.

Counting is one thread's, so a scrape asks, and that thread answers at its next wake, a fifth of a second later at most.
"""

from __future__ import annotations

import gzip
import logging
import threading
from typing import Any

from otel_infer.export import http_server
from otel_infer.export.metrics import openmetrics

log = logging.getLogger(__name__)

ANSWER_S = 4.0
"""How long a scrape waits; Prometheus itself gives up after 10 s."""
TRY_NS = 2_000_000_000
"""Between two tries to have the port."""
PATH = "/metrics"


class Scrape:
    """The endpoint, and what is asked of it. `address`: `PORT` or `ADDRESS:PORT`.

    The port may be somebody else's for now: the last sidecar's of a server that was started again, say.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._condition = threading.Condition()
        self._data: Any = None
        self._is_wanted = self._is_closed = False
        self._server: http_server.Server | None = None
        self._tried_at = 0

    def is_wanted(self, now: int) -> bool:
        """Whether somebody waits for what is counted; by the thread that counts. Listens, where it does not yet."""
        if self._server is None and (not self._tried_at or now - self._tried_at > TRY_NS):
            self._listen(now)
        return self._is_wanted

    def _listen(self, now: int) -> None:
        is_first, self._tried_at = not self._tried_at, now
        try:
            self._server = http_server.serve(self._address, _Handler, self, "otel_infer scrape")
        except OSError as reason:
            if is_first:
                log.error("no metrics to scrape at %s: %s", self._address, reason)

    def put(self, data: Any) -> None:
        """What is counted as of now; by the thread that counts."""
        with self._condition:
            self._data, self._is_wanted = data, False
            self._condition.notify_all()

    def collected(self) -> Any:
        """What is counted as of now, or None where nobody answers."""
        with self._condition:
            self._data, self._is_wanted = None, True
            self._condition.wait_for(lambda: self._data is not None or self._is_closed, ANSWER_S)
            return self._data

    def close(self) -> None:
        """Lets go of the port; who waits is not answered any more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._server is not None:
            self._server.close()


class _Handler(http_server.Handler):
    def do_GET(self) -> None:
        if self.asked_for() != PATH:
            self.answer(404, "text/plain", b"GET /metrics\n")
            return
        data = self.server.owner.collected()
        if data is None:
            self.answer(503, "text/plain", b"nothing was collected in time\n")
            return
        is_open = "application/openmetrics-text" in self.headers.get("Accept", "")
        content = openmetrics.text(data, is_open=is_open)
        kind = openmetrics.OPEN if is_open else openmetrics.PLAIN
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.answer(200, kind, gzip.compress(content, 1), Content_Encoding="gzip")
        else:
            self.answer(200, kind, content)

    do_HEAD = do_GET
