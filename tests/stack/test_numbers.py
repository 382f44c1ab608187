"""What the dashboards' questions answer, beside the exact quantiles of the same requests: within the width of a bucket."""

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
from tests.stack.running import loop_server, scraped
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]

LOAD_S = 25
REQUEST = "text_completion toy"


class Asked(NamedTuple):
    """A question of a dashboard: of which panel; the exact value of a request's spans; the bounds of its histogram."""

    file: str
    title: str
    exact: Callable[[dict[str, Any]], float | None]
    metric: semconv.Metric


def duration(name: str) -> Callable[[dict[str, Any]], float | None]:
    def of(span: dict[str, Any]) -> float | None:
        return span["duration"] if span["name"] == name else None

    return of


def ttft(span: dict[str, Any]) -> float | None:
    return span["attributes"].get(semconv.TTFT) if span["name"] == REQUEST else None


QUESTIONS = (
    Asked("overview.json", "Time to first token", ttft, semconv.TIME_TO_FIRST_TOKEN),
    Asked("overview.json", "Whole request", duration(REQUEST), semconv.REQUEST_DURATION),
    Asked("anatomy.json", "Queue: quantiles", duration("queue"), semconv.STAGE_DURATION),
    Asked("anatomy.json", "Prefill: quantiles", duration("prefill"), semconv.STAGE_DURATION),
    Asked("anatomy.json", "Decode: quantiles", duration("decode"), semconv.STAGE_DURATION),
)


def question(one: Asked, legend: str) -> str:
    (expr,) = [
        target["expr"]
        for panel in dashboards.build_dashboards()[one.file]["panels"]
        for target in (panel.get("targets", ()) if panel["title"] == one.title else ())
        if target["legendFormat"] == legend
    ]
    return str(expr)


def ask(port: int) -> Callable[[random.Random], None]:
    def once(draw: random.Random) -> None:
        post(port, "/", {"prompt": draw.choice((20, 60, 900)), "tokens": draw.randint(4, 30)})

    return once


def test_quantiles_of_the_dashboards_are_those_of_the_requests(tmp_path: Path) -> None:
    tool("prometheus")
    with OtlpReceiver() as receiver, ExitStack() as running:
        target, environ = scraped(receiver, OTEL_INFER_GPU_METRICS="off", OTEL_INFER_STEPS="off")
        server = loop_server(tmp_path / "log", environ, max_batch=8, prompt_ms=0.1)
        running.callback(lambda: server.process and server.stop())
        server.start()
        prometheus = Prometheus(tmp_path, {"toy": target})
        running.callback(prometheus.stop)
        for tokens in (4, 30):  # so that each series begins before what is counted
            post(server.port, "/", {"prompt": 20, "tokens": tokens})
        served = 'gen_ai_server_request_duration_seconds_count{gen_ai_request_model="toy"}'
        assert until(lambda: prometheus.value(served) == 2, 20)
        time.sleep(2)
        began = time.time_ns()
        load = Load(ask(server.port), 10, 0.2)
        time.sleep(LOAD_S)
        load.stop()
        assert until(lambda: prometheus.value(served) == load.asked + 2, 20)
        # Spans have a way of their own, and may come a little later than what is scraped.

        def told() -> list[dict[str, Any]]:
            return [_timed(span) for span in receiver.spans if span["start"] >= began]

        assert until(lambda: sum(span["name"] == REQUEST for span in told()) == load.asked, 20)
        spans = told()
        time.sleep(2)
        _compared(prometheus, spans)


def _timed(span: dict[str, Any]) -> dict[str, Any]:
    return {**span, "duration": (span["end"] - span["start"]) / 1e9}


def _compared(prometheus: Prometheus, spans: list[dict[str, Any]]) -> None:
    for one in QUESTIONS:
        exact = [value for span in spans if (value := one.exact(span)) is not None]
        assert len(exact) > 100, one.title
        for legend, q in (("p50", 0.5), ("p99", 0.99)):
            answer = prometheus.value(resolve_variables(question(one, legend), "60s"))
            true = float(np.quantile(exact, q, method="inverted_cdf"))
            width = max(_width(one.metric, true), _width(one.metric, answer))
            print(
                f"{one.title:24} {legend}: {true * 1e3:8.2f} ms, answered {answer * 1e3:8.2f} ± {width * 1e3:.2f}"
            )
            assert abs(answer - true) <= width, (one.title, legend, true, answer)


def _width(metric: semconv.Metric, value: float) -> float:
    """Of the bucket that a value is in."""
    bounds = (0.0, *metric.bounds)
    at = min(max(bisect_left(bounds, value), 1), len(bounds) - 1)
    return bounds[at] - bounds[at - 1]
