"""The thread that sends metrics, and its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from otel_infer.export.metrics import sender as sender_module


class RetryingExporter:
    """The SDK's exporter with a collector that never answers: `export` returns after `shutdown`."""

    def __init__(self) -> None:
        self.began, self.is_shut_down = threading.Event(), threading.Event()
        self.exported: list[str] = []

    def export(self, data: str) -> None:
        self.exported.append(data)
        self.began.set()
        assert self.is_shut_down.wait(10)

    def shutdown(self) -> None:
        self.is_shut_down.set()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> RetryingExporter:
    exporter = RetryingExporter()

    def make_exporter(protocol: str, compression: str) -> Any:
        return exporter

    monkeypatch.setattr(sender_module, "make_metric_exporter", make_exporter)
    return exporter


def test_close_stops_a_pending_export_and_the_thread(exporter: RetryingExporter) -> None:
    sender = sender_module.MetricsSender("grpc")
    sender.start()
    sender.put("first", is_delta=True)
    assert exporter.began.wait(5)
    sender.put("second", is_delta=True)
    sender.close(0.02)
    assert not sender.is_alive()
    assert exporter.exported == ["first"]


def test_close_shuts_down_an_idle_exporter(exporter: RetryingExporter) -> None:
    sender = sender_module.MetricsSender("grpc")
    sender.start()
    sender.close(1)
    assert exporter.is_shut_down.is_set() and not sender.is_alive()
