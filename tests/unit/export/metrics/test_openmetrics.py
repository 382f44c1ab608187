"""What a scraper reads: OpenMetrics as its own reference parser takes it, with exemplars; and the older format without."""

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
from tests.support.everything import ENDED_AT, SPAN_ID, TRACE_ID, said

RESOURCE = {"service.name": "vllm", "service.instance.id": "a-b"}


@pytest.fixture
def collected() -> Any:
    return said(MetricsAggregator(resource=RESOURCE, started_at_unix_ns=0)).collect(1)


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_is_told_as_openmetrics_wants_it(collected: Any) -> None:
    read = families(openmetrics.render_metrics(collected, is_open=True).decode())
    kinds = {semconv.HISTOGRAM: "histogram", semconv.COUNTER: "counter"}
    for metric in semconv.METRICS:
        family = read[prometheus.family_name(metric)]
        assert kinds.get(metric.instrument, "gauge") == family.type
        assert (prometheus.unit_suffix(metric), metric.description) == (family.unit, family.documentation)
        assert {sample.name for sample in family.samples} == set(prometheus.series_names(metric))
    assert read.keys() == {prometheus.family_name(metric) for metric in semconv.METRICS} | {"target"}


def test_buckets_are_cumulative_and_an_exemplar_lies_in_its_own(collected: Any) -> None:
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


def test_points_of_an_sdk_that_knows_no_exemplars_are_told_without(collected: Any) -> None:
    for metric in collected.resource_metrics[0].scope_metrics[0].metrics:
        points = [vars(point) for point in metric.data.data_points]
        metric.data.data_points[:] = [
            SimpleNamespace(**{key: value for key, value in point.items() if key != "exemplars"})
            for point in points
        ]
    read = families(openmetrics.render_metrics(collected, is_open=True).decode())
    assert read.keys() == {prometheus.family_name(metric) for metric in semconv.METRICS} | {"target"}
    assert not any(sample.exemplar for family in read.values() for sample in family.samples)


def test_the_resource_is_a_target(collected: Any) -> None:
    (sample,) = families(openmetrics.render_metrics(collected, is_open=True).decode())["target"].samples
    assert ("target_info", {"service_name": "vllm", "service_instance_id": "a-b"}, 1.0) == sample[:3]


def test_who_takes_no_openmetrics_gets_the_same_numbers_without_exemplars(collected: Any) -> None:
    text = openmetrics.render_metrics(collected, is_open=False).decode()
    read = {sample.name for family in parsed_plain(text) for sample in family.samples}
    assert {name for metric in semconv.METRICS for name in prometheus.series_names(metric)} | {
        "target_info"
    } == read
    assert "trace_id" not in text
    assert "# EOF" not in text


def test_what_labels_hold_is_escaped() -> None:
    sink = MetricsAggregator(resource={}, started_at_unix_ns=0)
    nasty = 'a"b\\c\nd'
    sink.set_value(semconv.SELF_LOST, {semconv.LOSS_REASON: nasty}, 1)
    read = families(openmetrics.render_metrics(sink.collect(1), is_open=True).decode())
    (sample,) = read["infer_self_lost"].samples
    assert nasty == sample.labels["infer_loss_reason"]


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def awake(port: int) -> Iterator[Pipeline]:
    """A pipeline that somebody wakes, with an endpoint."""
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


def asked(port: int, path: str = "/metrics", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), content


@pytest.mark.usefixtures("awake")
def test_a_scraper_gets_what_is_counted_now_in_the_format_that_it_takes(port: int) -> None:
    accepts = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    status, headers, content = asked(port, Accept=accepts)
    assert (200, openmetrics.OPENMETRICS_CONTENT_TYPE) == (status, headers["Content-Type"])
    assert "infer_self_memory_usage_bytes" in families(content.decode())
    status, headers, content = asked(port, Accept_Encoding="gzip")
    assert (200, openmetrics.TEXT_CONTENT_TYPE, "gzip") == (
        status,
        headers["Content-Type"],
        headers["Content-Encoding"],
    )
    assert b"infer_self_memory_usage_bytes" in gzip.decompress(content)


@pytest.mark.usefixtures("awake")
def test_another_path_is_not_there(port: int) -> None:
    assert (404, b"GET /metrics\n") == asked(port, "/")[::2]


def test_a_scraper_whom_nobody_answers_is_told_so(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_endpoint, "SCRAPE_TIMEOUT_S", 0.05)
    endpoint = prometheus_endpoint.ScrapeEndpoint(str(port))
    assert not endpoint.has_pending_scrape(1)
    try:
        assert asked(port)[0] == 503
    finally:
        endpoint.close()


def test_a_port_that_is_taken_is_said_once_costs_nothing_and_is_had_when_it_is_free(
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
        assert asked(port)[0] == 503
    finally:
        second.close()
    assert caplog.text.count(f"no metrics to scrape at {port}") == 1
