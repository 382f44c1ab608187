"""Sends metrics from a background thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from importlib import import_module
from typing import Any

from opentelemetry.sdk.metrics import export

log = logging.getLogger(__name__)

MAX_PENDING = 8
"""Deltas that may wait while another is sent. Later counts are part of a later delta."""


class MetricsSender(threading.Thread):
    """The thread that sends collected metrics through the SDK's exporter, one collection at a time.

    A periodic collection is accepted only while the thread is idle, because the next one contains its values
    (cumulative) or adds them (delta). The collections of a flush and of the end may wait in the queue.
    """

    def __init__(self, protocol: str, compression: str = "") -> None:
        super().__init__(name="otel_infer-metrics", daemon=True)
        self._exporter = make_metric_exporter(protocol, compression)
        self._condition = threading.Condition()
        self._pending: deque[Any] = deque()
        self._busy = self._closing = self._has_refused = False
        self.failed_exports = 0

    @property
    def is_idle(self) -> bool:
        """Whether every accepted collection has been sent."""
        return not self._pending and not self._busy

    def can_accept(self, *, behind: bool) -> bool:
        """Returns whether a collection can be put now.

        `behind`: it may wait for others, if the queue has room.
        """
        takes = len(self._pending) < MAX_PENDING if behind else self.is_idle
        self._has_refused = (self._has_refused or behind) and not takes
        return takes

    def put(self, data: Any, *, is_delta: bool) -> None:
        """Queues a collection. It replaces waiting collections, unless they are deltas."""
        with self._condition:
            if not is_delta:
                self._pending.clear()
            self._pending.append(data)
            self._condition.notify_all()

    def run(self) -> None:
        while True:
            with self._condition:
                while not self._pending and not self._closing:
                    self._condition.wait()
                if not self._pending:
                    return
                data, self._busy = self._pending.popleft(), True
            try:
                result = self._exporter.export(data)
                self.failed_exports += getattr(result, "name", "SUCCESS") != "SUCCESS"
            except Exception as error:  # an exporter's bug must not end the thread
                self.failed_exports += 1
                log.warning("metrics were not exported: %s", type(error).__name__)
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until every accepted collection was tried.

        Returns False if `timeout` s were not enough, or if the queue had no room for a collection.
        """
        with self._condition:
            return self._condition.wait_for(lambda: self.is_idle, timeout) and not self._has_refused

    def close(self, timeout: float) -> None:
        """Sends the rest for at most `timeout` s, then discards it and stops the thread."""
        if not self.wait(timeout):
            log.warning("the last metrics were not sent within %.0f s", timeout)
        with self._condition:
            self._pending.clear()
            self._closing = True
            self._condition.notify_all()
        self._exporter.shutdown()  # stops a pending retry, and closes the connection
        self.join(1.0)


def make_metric_exporter(protocol: str, compression: str = "") -> export.MetricExporter:
    """Returns the SDK's OTLP exporter: `grpc`, or HTTP for any other value.

    `compression`: `none`, `gzip` or `deflate`; empty = none. It is passed on because the gRPC exporter
    accepts only gzip from the environment (SDK 1.45). The exporter reads its other settings from there.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        names = import_module("grpc").Compression
        by_name = {"gzip": names.Gzip, "deflate": names.Deflate}
        return GrpcExporter(compression=by_name.get(compression, names.NoCompression))
    from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter(compression=HttpCompression(compression or "none"))
