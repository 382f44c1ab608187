"""The Prometheus endpoint: OpenMetrics with exemplars, read by the reference parser, and the text format without exemplars."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parsed_plain

from otel_infer import semconv
from otel_infer.config.environment import Config
from otel_infer.export.metrics import openmetrics, prometheus_endpoint
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.semconv import prometheus
from otel_infer.sidecar.pipeline import Pipeline
from tests.support.everything import ENDED_AT, SPAN_ID, TRACE_ID, fill_every_metric

RESOURCE = {"service.name": "vllm", "service.instance.id": "a-b"}


@pytest.fixture
def collected() -> Any:
    return fill_every_metric(MetricsAggregator(resource=RESOURCE, started_at_unix_ns=0)).collect(1)


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_each_metric_is_valid_openmetrics(collected: Any) -> None:
    read = families(openmetrics.render_metrics(collected, is_open=True).decode())
    kinds = {semconv.HISTOGRAM: "histogram", semconv.COUNTER: "counter"}
    for metric in semconv.METRICS:
        family = read[prometheus.family_name(metric)]
        assert kinds.get(metric.instrument, "gauge") == family.type
        assert (prometheus.unit_suffix(metric), metric.description) == (family.unit, family.documentation)
        assert {sample.name for sample in family.samples} == set(prometheus.series_names(metric))
    assert read.keys() == {prometheus.family_name(metric) for metric in semconv.METRICS} | {"target"}


def test_buckets_are_cumulative_and_hold_their_exemplar(collected: Any) -> None:
    read = families(openmetrics.render_metrics(collected, is_open=True).decode())
    bounds = semconv.TIME_TO_FIRST_TOKEN.bounds
    samples = [
        sample
        for sample in read["gen_ai_server_time_to_first_token_seconds"].samples
        if "le" in sample.labels
    ]
    assert [sample.value for sample in samples] == [0, 0, 0] + [1] * (len(bounds) - 3) + [2]
    (found,) = [sample for sample in samples if sample.exemplar]
    assert (repr(bounds[3]), bounds[3]) == (found.labels["le"], found.exemplar.value)
    assert {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{SPAN_ID:016x}"} == found.exemplar.labels
    assert float(found.exemplar.timestamp) == pytest.approx(ENDED_AT / 1e9, abs=1e-3)


def test_sdk_without_exemplars_renders_points_without_them(collected: Any) -> None:
    for metric in collected.resource_metrics[0].scope_metrics[0].metrics:
        points = [vars(point) for point in metric.data.data_points]
        metric.data.data_points[:] = [
            SimpleNamespace(**{key: value for key, value in point.items() if key != "exemplars"})
            for point in points
        ]
    read = families(openmetrics.render_metrics(collected, is_open=True).decode())
    assert read.keys() == {prometheus.family_name(metric) for metric in semconv.METRICS} | {"target"}
    assert not any(sample.exemplar for family in read.values() for sample in family.samples)


def test_resource_is_target_info(collected: Any) -> None:
    (sample,) = families(openmetrics.render_metrics(collected, is_open=True).decode())["target"].samples
    assert ("target_info", {"service_name": "vllm", "service_instance_id": "a-b"}, 1.0) == sample[:3]


def test_text_format_has_the_same_series_without_exemplars(collected: Any) -> None:
    text = openmetrics.render_metrics(collected, is_open=False).decode()
    read = {sample.name for family in parsed_plain(text) for sample in family.samples}
    assert {name for metric in semconv.METRICS for name in prometheus.series_names(metric)} | {
        "target_info"
    } == read
    assert "trace_id" not in text
    assert "# EOF" not in text


def test_label_values_are_escaped() -> None:
    aggregator = MetricsAggregator(resource={}, started_at_unix_ns=0)
    nasty = 'a"b\\c\nd'
    aggregator.set_value(semconv.SELF_LOST, {semconv.LOSS_REASON: nasty}, 1)
    read = families(openmetrics.render_metrics(aggregator.collect(1), is_open=True).decode())
    (sample,) = read["infer_self_lost"].samples
    assert nasty == sample.labels["infer_loss_reason"]


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def running_pipeline(port: int) -> Iterator[Pipeline]:
    """A pipeline that runs in a thread, with a scrape endpoint."""
    pipeline = Pipeline(
        Config(metrics_port=str(port), gpu_metrics=False), MergedReader(), [], None, RESOURCE, None, 0
    )
    over = threading.Event()

    def wake() -> None:
        while not over.wait(0.02):
            pipeline.run_cycle(1)

    pipeline.run_cycle(1)
    thread = threading.Thread(target=wake)
    thread.start()
    yield pipeline
    over.set()
    thread.join()
    pipeline.close(1)


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), content


@pytest.mark.usefixtures("running_pipeline")
def test_scrape_returns_current_values_in_the_accepted_format(port: int) -> None:
    accepts = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    status, headers, content = get(port, Accept=accepts)
    assert (200, openmetrics.OPENMETRICS_CONTENT_TYPE) == (status, headers["Content-Type"])
    assert "infer_self_memory_usage_bytes" in families(content.decode())
    status, headers, content = get(port, Accept_Encoding="gzip")
    assert (200, openmetrics.TEXT_CONTENT_TYPE, "gzip") == (
        status,
        headers["Content-Type"],
        headers["Content-Encoding"],
    )
    assert b"infer_self_memory_usage_bytes" in gzip.decompress(content)


@pytest.mark.usefixtures("running_pipeline")
def test_unknown_path_is_404(port: int) -> None:
    assert (404, b"GET /metrics\n") == get(port, "/")[::2]


def test_unanswered_scrape_is_503(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_endpoint, "SCRAPE_TIMEOUT_S", 0.05)
    endpoint = prometheus_endpoint.ScrapeEndpoint(str(port))
    assert not endpoint.has_pending_scrape(1)
    try:
        assert get(port)[0] == 503
    finally:
        endpoint.close()


def test_occupied_port_is_logged_once_and_retried(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_endpoint, "SCRAPE_TIMEOUT_S", 0.05)
    first, second = (
        prometheus_endpoint.ScrapeEndpoint(str(port)),
        prometheus_endpoint.ScrapeEndpoint(str(port)),
    )
    first.has_pending_scrape(1)
    for now in (1, 2, 3 * prometheus_endpoint.BIND_RETRY_NS):
        assert not second.has_pending_scrape(now)
    first.close()
    second.has_pending_scrape(5 * prometheus_endpoint.BIND_RETRY_NS)
    try:
        assert get(port)[0] == 503
    finally:
        second.close()
    assert len([line for line in caplog.messages if str(port) in line]) == 1
