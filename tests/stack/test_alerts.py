"""Alerts for real: pending, firing, at Alertmanager, at a webhook; from there to the request that is to blame; and over."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from otel_infer import semconv
from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from tests.stack.load import Load, post
from tests.stack.processes import Alertmanager, Hook, Prometheus, until
from tests.stack.running import loop_server, scraped
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver, ok, status

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

JOB, WITHIN = "toy", 0.5
SPEC = slo_spec.DEFAULT_SPEC._replace(
    windows=slo_spec.DEMO_WINDOWS,
    minimum=20,
    grafana="https://grafana.example",
    runbooks="https://docs.example/alerts",
)
TTFT, KV, DROPPING = "OtelInferTTFTBudgetBurn", "OtelInferKVCachePressure", "OtelInferTelemetryDropping"
SERVER = {"max_batch": 8, "prompt_ms": 0.3, "kv_blocks": 310, "preempted_ms": 20}
LONG, SHORT = (1200, 80), (40, 10)
"""A prompt, and the tokens of its answer."""


class Site(NamedTuple):
    """A server that is watched. `port`: its own."""

    prometheus: Prometheus
    hook: Hook
    receiver: OtlpReceiver
    port: int


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    tool("alertmanager")
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "rules.yml").write_text(rules_to_yaml(burn_rate_rules.build_rule_groups(SPEC)))
    with OtlpReceiver() as receiver, ExitStack() as running:
        target, environ = scraped(receiver, OTEL_INFER_GPU_METRICS="off")
        server = loop_server(folder / "server.log", environ, **SERVER)
        running.callback(lambda: server.process and server.stop())
        server.start()
        hook = Hook()
        running.callback(hook.close)
        alertmanager = Alertmanager(folder, hook.url)
        running.callback(alertmanager.stop)
        prometheus = Prometheus(folder, {JOB: target}, [folder / "rules.yml"], alertmanager.url)
        running.callback(prometheus.stop)
        yield Site(prometheus, hook, receiver, server.port)


def asks(port: int, what: tuple[int, int], threads: int) -> Load:
    """This, again and again."""

    def ask(draw: random.Random) -> None:
        post(port, "/", {"prompt": what[0], "tokens": what[1]})

    return Load(ask, threads, 0.2)


def test_what_goes_wrong_is_told_with_a_way_to_the_request_and_what_is_mended_is_over(site: Site) -> None:
    states: dict[str, list[str]] = {name: [] for name in (TTFT, KV, DROPPING)}

    def look() -> dict[str, str]:
        now = site.prometheus.alerts()
        for name, seen in states.items():
            if now.get(name, "inactive") != (seen or [""])[-1]:
                seen.append(now.get(name, "inactive"))
        return now

    with ExitStack() as loads:
        loads.callback(asks(site.port, SHORT, 3).stop)
        assert not until(lambda: look().keys() & states, 20, 1), states

        site.receiver.answer(status(400))
        slow = asks(site.port, LONG, 12)
        loads.callback(slow.stop)
        told = until(lambda: look() and all(site.hook.told(name, "firing") for name in states), 100, 0.5)
        assert told, states
        look()  # it may have begun to fire since the last one
        for name, seen in states.items():
            assert seen[-2:] == ["pending", "firing"], (name, seen)

        site.receiver.answer(ok())
        _leads_to_the_request(site)
        slow.stop()
        over = until(lambda: look() and all(site.hook.told(name, "resolved") for name in states), 120, 0.5)
        assert over, states


def _leads_to_the_request(site: Site) -> None:
    """From the alert's link to its dashboard, from an exemplar there to the trace."""
    alert = site.hook.told(TTFT, "firing")[0]
    assert alert["labels"].items() >= {
        ("job", JOB), ("gen_ai_request_model", "toy"), ("severity", "page"), ("slo", "ttft"),
    }  # fmt: skip
    assert alert["annotations"]["runbook_url"] == "https://docs.example/alerts#otelinferttftbudgetburn"
    link = urlsplit(alert["annotations"]["dashboard_url"])
    (board,) = [one for one in dashboards.build_dashboards().values() if link.path == f"/d/{one['uid']}"]
    chosen = {key.removeprefix("var-"): value for key, (value,) in parse_qs(link.query).items()}

    def slow_ones() -> set[str]:
        found = _exemplars(site.prometheus, board, chosen)
        return {trace_id for trace_id, value in found if value > WITHIN}

    assert until(lambda: slow_ones() & _slow_requests(site.receiver), 30, 1)


def _exemplars(
    prometheus: Prometheus, board: dict[str, Any], chosen: dict[str, str]
) -> list[tuple[str, float]]:
    """Of the panel of the p99 that the alert is about."""
    (expr,) = [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
        if panel["title"] == "Time to first token" and target["legendFormat"] == "p99"
    ]
    now = time.time()
    said = prometheus.ask.get(
        "query_exemplars", query=resolve_variables(expr, "30s", **chosen), start=f"{now - 300}", end=f"{now}"
    )
    return [
        (one["labels"]["trace_id"], float(one["value"])) for series in said for one in series["exemplars"]
    ]


def _slow_requests(receiver: OtlpReceiver) -> set[str]:
    """Trace ids of the request spans that say themselves that they breached."""
    return {span["trace_id"] for span in receiver.spans if span["attributes"].get(semconv.TTFT, 0.0) > WITHIN}
