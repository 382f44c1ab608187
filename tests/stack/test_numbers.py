"""Quantiles from dashboard queries match the exact quantiles of the same requests within one bucket."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from tests.stack.load import Load, post
from tests.stack.processes import Prometheus, until
from tests.stack.running import loop_server, make_environ
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

LOAD_S = 25
REQUEST = "text_completion toy"


class QuantileQuery(NamedTuple):
    """A panel's query, the exact value of a request's spans, and the metric with the histogram bounds."""

    file: str
    title: str
    exact: Callable[[dict[str, Any]], float | None]
    metric: semconv.Metric


def duration(name: str) -> Callable[[dict[str, Any]], float | None]:
    def read_duration(span: dict[str, Any]) -> float | None:
        return span["duration"] if span["name"] == name else None

    return read_duration


def ttft(span: dict[str, Any]) -> float | None:
    return span["attributes"].get(semconv.TTFT) if span["name"] == REQUEST else None


QUERIES = (
    QuantileQuery("overview.json", "Time to first token", ttft, semconv.TIME_TO_FIRST_TOKEN),
    QuantileQuery("overview.json", "Whole request", duration(REQUEST), semconv.REQUEST_DURATION),
    QuantileQuery("latency-breakdown.json", "Queue: quantiles", duration("queue"), semconv.STAGE_DURATION),
    QuantileQuery(
        "latency-breakdown.json", "Prefill: quantiles", duration("prefill"), semconv.STAGE_DURATION
    ),
    QuantileQuery("latency-breakdown.json", "Decode: quantiles", duration("decode"), semconv.STAGE_DURATION),
)


def find_expr(query: QuantileQuery, legend: str) -> str:
    (expr,) = [
        target["expr"]
        for panel in dashboards.build_dashboards()[query.file]["panels"]
        for target in (panel.get("targets", ()) if panel["title"] == query.title else ())
        if target["legendFormat"] == legend
    ]
    return str(expr)


def make_client(port: int) -> Callable[[random.Random], None]:
    def send(rng: random.Random) -> None:
        post(port, "/", {"prompt": rng.choice((20, 60, 900)), "tokens": rng.randint(4, 30)})

    return send


def test_dashboard_quantiles_match_the_requests(tmp_path: Path) -> None:
    tool("prometheus")
    with OtlpReceiver() as receiver, ExitStack() as running:
        target, environ = make_environ(receiver, OTEL_INFER_GPU_METRICS="off", OTEL_INFER_STEPS="off")
        server = loop_server(tmp_path / "log", environ, max_batch=8, prompt_ms=0.1)
        running.callback(lambda: server.process and server.stop())
        server.start()
        prometheus = Prometheus(tmp_path, {"toy": target})
        running.callback(prometheus.stop)
        for tokens in (4, 30):  # creates each series before the counted requests
            post(server.port, "/", {"prompt": 20, "tokens": tokens})
        served = 'gen_ai_server_request_duration_seconds_count{gen_ai_request_model="toy"}'
        assert until(lambda: prometheus.value(served) == 2, 20)
        time.sleep(2)
        started_at = time.time_ns()
        load = Load(make_client(server.port), 10, 0.2)
        time.sleep(LOAD_S)
        load.stop()
        assert until(lambda: prometheus.value(served) == load.sent + 2, 20)
        # Spans are exported separately, and may arrive a little later than the scraped metrics.

        def served_spans() -> list[dict[str, Any]]:
            return [_add_duration(span) for span in receiver.spans if span["start"] >= started_at]

        assert until(lambda: sum(span["name"] == REQUEST for span in served_spans()) == load.sent, 20)
        spans = served_spans()
        time.sleep(2)
        _compare(prometheus, spans)


def _add_duration(span: dict[str, Any]) -> dict[str, Any]:
    return {**span, "duration": (span["end"] - span["start"]) / 1e9}


def _compare(prometheus: Prometheus, spans: list[dict[str, Any]]) -> None:
    for query in QUERIES:
        exact = [value for span in spans if (value := query.exact(span)) is not None]
        assert len(exact) > 100, query.title
        for legend, q in (("p50", 0.5), ("p99", 0.99)):
            estimate = prometheus.value(resolve_variables(find_expr(query, legend), "60s"))
            true = float(np.quantile(exact, q, method="inverted_cdf"))
            width = max(_bucket_width(query.metric, true), _bucket_width(query.metric, estimate))
            print(
                f"{query.title:24} {legend}: {true * 1e3:8.2f} ms, estimated {estimate * 1e3:8.2f} ± {width * 1e3:.2f}"
            )
            assert abs(estimate - true) <= width, (query.title, legend, true, estimate)


def _bucket_width(metric: semconv.Metric, value: float) -> float:
    """Returns the width of the bucket that contains a value."""
    bounds = (0.0, *metric.bounds)
    at = min(max(bisect_left(bounds, value), 1), len(bounds) - 1)
    return bounds[at] - bounds[at - 1]
