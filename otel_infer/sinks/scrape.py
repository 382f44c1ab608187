"""`GET /metrics`, for Prometheus: what is counted, as of now, with exemplars for who accepts OpenMetrics.

Counting is one thread's, so a scrape asks, and that thread answers at its next wake, a fifth of a second later at most.
"""

from __future__ import annotations

import gzip
import logging
import threading
from typing import Any

from otel_infer import loopback
from otel_infer.sinks import openmetrics

log = logging.getLogger(__name__)

ANSWER_S = 4.0
"""How long a scrape waits; Prometheus itself gives up after 10 s."""
PATH = "/metrics"


class Scrape:
    """The endpoint, and what is asked of it. `address`: `PORT` or `ADDRESS:PORT`; raises `OSError` where it cannot be had."""

    def __init__(self, address: str) -> None:
        self._condition = threading.Condition()
        self._data: Any = None
        self.is_wanted = False
        self._server = loopback.serve(address, _Handler, self, "otel_infer scrape")
        self.port = self._server.server_port

    def put(self, data: Any) -> None:
        """What is counted as of now; by the thread that counts."""
        with self._condition:
            self._data, self.is_wanted = data, False
            self._condition.notify_all()

    def collected(self) -> Any:
        """What is counted as of now, or None where nobody answers."""
        with self._condition:
            self._data, self.is_wanted = None, True
            self._condition.wait_for(lambda: self._data is not None, ANSWER_S)
            return self._data

    def close(self) -> None:
        """Lets go of the port."""
        self._server.close()


class _Handler(loopback.Handler):
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


def serve(address: str) -> Scrape | None:
    """The endpoint, or nothing where none is asked for or the port is somebody else's: another sidecar's of this host, say."""
    try:
        return Scrape(address) if address else None
    except (OSError, OverflowError) as reason:
        log.error("no metrics to scrape at %s: %s", address, reason)
        return None
