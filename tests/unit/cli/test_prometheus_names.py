"""`dashboards check` and `alerts test` name the reason why queries find no series."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from otel_infer import cli, semconv
from otel_infer.cli import prometheus_names
from otel_infer.monitoring.native_histograms import HISTOGRAM_FAMILIES
from otel_infer.semconv import prometheus

OWN = {name for metric in semconv.METRICS for name in prometheus.series_names(metric)}
NATIVE = {
    prometheus.family_name(metric) if metric.instrument == semconv.HISTOGRAM else prometheus.series_names(metric)[0]
    for metric in semconv.METRICS
}  # fmt: skip


def translate(strategy: str) -> set[str]:
    """Returns all names as Prometheus 3 stores them with this strategy."""
    names = set()
    for metric in semconv.METRICS:
        name = metric.name
        if strategy == "NoUTF8EscapingWithSuffixes":
            own = prometheus.series_names(metric)[0].removesuffix("_bucket")
            name += own[len(name) :]
        if strategy.startswith("Underscore"):
            name = name.replace(".", "_")
        histogram = metric.instrument == semconv.HISTOGRAM
        names |= {name + ending for ending in (("_bucket", "_sum", "_count") if histogram else ("",))}
    return names


@pytest.mark.parametrize(
    "strategy", ["NoUTF8EscapingWithSuffixes", "NoTranslation", "UnderscoreEscapingWithoutSuffixes"]
)
def test_another_strategy_is_named_with_its_setting(strategy: str) -> None:
    (sentence,) = prometheus_names.explain_names(translate(strategy), native=False)
    assert f"translation_strategy {strategy}; set" in sentence
    assert "translation_strategy: UnderscoreEscapingWithSuffixes" in sentence


@pytest.mark.parametrize("names", [OWN, set(), {"up", "go_goroutines"}], ids=["own", "none", "foreign"])
def test_own_and_foreign_names_need_no_explanation(names: set[str]) -> None:
    assert list(prometheus_names.explain_names(names, native=False)) == []


def test_the_wrong_kind_of_histograms_is_named() -> None:
    assert list(prometheus_names.explain_names(NATIVE, native=True)) == []
    (native,) = prometheus_names.explain_names(NATIVE, native=False)
    assert "--histograms native" in native
    assert "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION=explicit_bucket_histogram" in native
    (classic,) = prometheus_names.explain_names(OWN, native=True)
    assert "explicit buckets" in classic


class _NamesHandler(BaseHTTPRequestHandler):
    """A Prometheus with these names. Queries that ask only for known series have a value."""

    names: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        data: Any = sorted(self.names)
        if "/query?" in self.path:
            data = {"result": [{"value": [0, "1"]}] if self.names & {*OWN, *HISTOGRAM_FAMILIES} else []}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": data}).encode())

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _NamesHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("command", [["dashboards", "check"], ["alerts", "test"]], ids=" ".join)
@pytest.mark.parametrize(
    ("names", "status", "text"),
    [
        (OWN, 0, " 0 rejected"),
        ({"up"}, 1, "nothing has data; run `otel-infer doctor`"),
        (translate("NoTranslation"), 1, "translation_strategy NoTranslation"),
        (NATIVE, 1, "--histograms native"),
    ],
    ids=["own", "foreign", "strategy", "native"],
)
def test_the_check_fails_where_nothing_has_data(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    names: set[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.setattr(_NamesHandler, "names", names)
    assert cli.main([*command, "--prometheus", url]) == status
    assert text in capsys.readouterr().out
