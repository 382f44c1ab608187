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

SCRAPE_TIMEOUT_S = 4.0
"""How long a scrape waits; Prometheus itself gives up after 10 s."""
BIND_RETRY_NS = 2_000_000_000
"""Between two tries to have the port."""
METRICS_PATH = "/metrics"


class ScrapeEndpoint:
    """The endpoint, and what is asked of it. `address`: `PORT` or `ADDRESS:PORT`.

    The port may be somebody else's for now: the last sidecar's of a server that was started again, say.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._condition = threading.Condition()
        self._data: Any = None
        self._is_pending = self._is_closed = False
        self._server: http_server.BackgroundServer | None = None
        self._bind_tried_at = 0

    def has_pending_scrape(self, now: int) -> bool:
        """Whether somebody waits for what is counted; by the thread that counts. Listens, where it does not yet."""
        if self._server is None and (not self._bind_tried_at or now - self._bind_tried_at > BIND_RETRY_NS):
            self._start_listening(now)
        return self._is_pending

    def _start_listening(self, now: int) -> None:
        is_first, self._bind_tried_at = not self._bind_tried_at, now
        try:
            self._server = http_server.start_server(self._address, _ScrapeHandler, self, "otel_infer scrape")
        except OSError as reason:
            if is_first:
                log.error("no metrics to scrape at %s: %s", self._address, reason)

    def publish_metrics(self, data: Any) -> None:
        """What is counted as of now; by the thread that counts."""
        with self._condition:
            self._data, self._is_pending = data, False
            self._condition.notify_all()

    def wait_for_metrics(self) -> Any:
        """What is counted as of now, or None where nobody answers."""
        with self._condition:
            self._data, self._is_pending = None, True
            self._condition.wait_for(lambda: self._data is not None or self._is_closed, SCRAPE_TIMEOUT_S)
            return self._data

    def close(self) -> None:
        """Lets go of the port; who waits is not answered any more."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._server is not None:
            self._server.close()


class _ScrapeHandler(http_server.HttpHandler):
    def do_GET(self) -> None:
        if self.path_without_query() != METRICS_PATH:
            self.send_content(404, "text/plain", b"GET /metrics\n")
            return
        data = self.server.owner.wait_for_metrics()
        if data is None:
            self.send_content(503, "text/plain", b"nothing was collected in time\n")
            return
        is_open = "application/openmetrics-text" in self.headers.get("Accept", "")
        content = openmetrics.render_metrics(data, is_open=is_open)
        kind = openmetrics.OPENMETRICS_CONTENT_TYPE if is_open else openmetrics.TEXT_CONTENT_TYPE
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_content(200, kind, gzip.compress(content, 1), Content_Encoding="gzip")
        else:
            self.send_content(200, kind, content)

    do_HEAD = do_GET
