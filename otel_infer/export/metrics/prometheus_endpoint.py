"""Serves the current metrics at `GET /metrics` for Prometheus.

Clients that accept OpenMetrics also get exemplars.
Only one thread counts metrics. So a scrape leaves a request, which that thread answers when it wakes up,
after at most 0.6 s.
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
"""How long a scrape waits; Prometheus' own default timeout is 10 s."""
BIND_RETRY_NS = 2_000_000_000
"""Time between two attempts to listen on the port."""
METRICS_PATH = "/metrics"


class ScrapeEndpoint:
    """The endpoint, and the pending scrape. `address`: `PORT` or `ADDRESS:PORT`.

    Another process may still use the port, for example the previous sidecar of a restarted server. Then
    listening is retried.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._condition = threading.Condition()
        self._data: Any = None
        self._published = 0
        self._is_pending = self._is_closed = False
        self._server: http_server.BackgroundServer | None = None
        self._bind_tried_at = 0

    def has_pending_scrape(self, now: int) -> bool:
        """Returns whether a scrape waits for metrics.

        For the counting thread; it also starts listening if needed.
        """
        if self._server is None and (not self._bind_tried_at or now - self._bind_tried_at > BIND_RETRY_NS):
            self._start_listening(now)
        return self._is_pending

    def _start_listening(self, now: int) -> None:
        is_first, self._bind_tried_at = not self._bind_tried_at, now
        try:
            self._server = http_server.start_server(self._address, _ScrapeHandler, self, "otel_infer scrape")
        except OSError as reason:
            if is_first:
                log.error("cannot listen on %s for scrapes, retrying: %s", self._address, reason)

    def publish_metrics(self, data: Any) -> None:
        """Hands the current metrics to the waiting scrape. For the counting thread."""
        with self._condition:
            self._data, self._is_pending = data, False
            self._published += 1
            self._condition.notify_all()

    def wait_for_metrics(self) -> Any:
        """Returns the current metrics; None if the counting thread did not publish them in time.

        Scrapes that wait at the same time get the same metrics.
        """
        with self._condition:
            before, self._is_pending = self._published, True
            self._condition.wait_for(lambda: self._published > before or self._is_closed, SCRAPE_TIMEOUT_S)
            return self._data if self._published > before else None

    def close(self) -> None:
        """Releases the port; waiting scrapes get no metrics."""
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
            self.send_content(503, "text/plain", b"metrics were not collected in time\n")
            return
        is_open = "application/openmetrics-text" in self.headers.get("Accept", "")
        content = openmetrics.render_metrics(data, is_open=is_open)
        kind = openmetrics.OPENMETRICS_CONTENT_TYPE if is_open else openmetrics.TEXT_CONTENT_TYPE
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_content(200, kind, gzip.compress(content, 1), Content_Encoding="gzip")
        else:
            self.send_content(200, kind, content)

    do_HEAD = do_GET
