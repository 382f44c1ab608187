"""The thread that sends metrics."""

from __future__ import annotations

import logging
import threading
from typing import Any

from opentelemetry.sdk.metrics import export

log = logging.getLogger(__name__)


class MetricsOutlet(threading.Thread):
    """Sends collected metrics by the SDK's exporter; a collection that finds the last one still being sent is skipped,
    since the next one says it all again (cumulative) or carries it along (delta is collected only when free)."""

    def __init__(self, protocol: str) -> None:
        super().__init__(name="otel_infer-metrics", daemon=True)
        self._exporter = metric_exporter(protocol)
        self._condition = threading.Condition()
        self._data: Any = None
        self._busy = self._closing = False
        self.failed = 0

    @property
    def free(self) -> bool:
        """Whether the last collection has been sent."""
        return self._data is None and not self._busy

    def put(self, data: Any) -> None:
        """Hands over one collection."""
        with self._condition:
            self._data = data
            self._condition.notify()

    def run(self) -> None:
        while True:
            with self._condition:
                while self._data is None and not self._closing:
                    self._condition.wait()
                if self._data is None:
                    return
                data, self._data, self._busy = self._data, None, True
            try:
                result = self._exporter.export(data)
                self.failed += getattr(result, "name", "SUCCESS") != "SUCCESS"
            except Exception:  # an exporter's bug must not end the thread
                self.failed += 1
                log.warning("metrics were not exported", exc_info=True)
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until the last collection has been sent or given up; False if `timeout` s were not enough."""
        with self._condition:
            return self._condition.wait_for(lambda: self.free, timeout)

    def close(self, timeout: float) -> None:
        """Sends what is left, for at most `timeout` s."""
        self.wait(timeout)
        with self._condition:
            self._closing = True
            self._condition.notify_all()


def metric_exporter(protocol: str) -> export.MetricExporter:
    """The SDK's OTLP exporter: `grpc`, or HTTP for anything else; it reads all its settings itself."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter()
