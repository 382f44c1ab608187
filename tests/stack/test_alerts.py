"""Real alerts: pending, firing, sent to a webhook with a link to the slow request, and resolved."""

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
from tests.stack.processes import Alertmanager, Prometheus, Webhook, until
from tests.stack.running import loop_server, make_environ
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
"""Prompt tokens and output tokens of a request."""


class MonitoredServer(NamedTuple):
    """A monitored server. `port` is the port of the server."""

    prometheus: Prometheus
    webhook: Webhook
    receiver: OtlpReceiver
    port: int


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredServer]:
    tool("alertmanager")
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "rules.yml").write_text(rules_to_yaml(burn_rate_rules.build_rule_groups(SPEC)))
    with OtlpReceiver() as receiver, ExitStack() as running:
        target, environ = make_environ(receiver, OTEL_INFER_GPU_METRICS="off")
        server = loop_server(folder / "server.log", environ, **SERVER)
        running.callback(lambda: server.process and server.stop())
        server.start()
        webhook = Webhook()
        running.callback(webhook.close)
        alertmanager = Alertmanager(folder, webhook.url)
        running.callback(alertmanager.stop)
        prometheus = Prometheus(folder, {JOB: target}, [folder / "rules.yml"], alertmanager.url)
        running.callback(prometheus.stop)
        yield MonitoredServer(prometheus, webhook, receiver, server.port)


def start_load(port: int, sizes: tuple[int, int], threads: int) -> Load:
    """Starts clients that repeat a request with these prompt and output tokens."""

    def send(rng: random.Random) -> None:
        post(port, "/", {"prompt": sizes[0], "tokens": sizes[1]})

    return Load(send, threads, 0.2)


def test_alerts_fire_lead_to_the_request_and_resolve(site: MonitoredServer) -> None:
    states: dict[str, list[str]] = {name: [] for name in (TTFT, KV, DROPPING)}

    def poll_alerts() -> dict[str, str]:
        current = site.prometheus.alerts()
        for name, seen in states.items():
            if current.get(name, "inactive") != (seen or [""])[-1]:
                seen.append(current.get(name, "inactive"))
        return current

    with ExitStack() as loads:
        loads.callback(start_load(site.port, SHORT, 3).stop)
        assert not until(lambda: poll_alerts().keys() & states, 20, 1), states

        site.receiver.answer(status(400))
        slow = start_load(site.port, LONG, 12)
        loads.callback(slow.stop)
        fired = until(
            lambda: poll_alerts() and all(site.webhook.find_alerts(name, "firing") for name in states),
            100,
            0.5,
        )
        assert fired, states
        poll_alerts()  # an alert may fire between the last poll and its notification
        for name, seen in states.items():
            expected = (
                ["firing"] if name == DROPPING else ["pending", "firing"]
            )  # a burst has no second chance
            assert seen[-len(expected) :] == expected, (name, seen)

        site.receiver.answer(ok())
        _check_link_to_request(site)
        slow.stop()
        resolved = until(
            lambda: poll_alerts() and all(site.webhook.find_alerts(name, "resolved") for name in states),
            120,
            0.5,
        )
        assert resolved, states


def _check_link_to_request(site: MonitoredServer) -> None:
    """Follows the alert's link to its dashboard, and an exemplar there to the trace."""
    alert = site.webhook.find_alerts(TTFT, "firing")[0]
    assert alert["labels"].items() >= {
        ("job", JOB), ("gen_ai_request_model", "toy"), ("severity", "page"), ("slo", "ttft"),
    }  # fmt: skip
    assert alert["annotations"]["runbook_url"] == "https://docs.example/alerts#otelinferttftbudgetburn"
    link = urlsplit(alert["annotations"]["dashboard_url"])
    (board,) = [
        board for board in dashboards.build_dashboards().values() if link.path == f"/d/{board['uid']}"
    ]
    variables = {key.removeprefix("var-"): value for key, (value,) in parse_qs(link.query).items()}

    def slow_exemplars() -> set[str]:
        exemplars = _exemplars(site.prometheus, board, variables)
        return {trace_id for trace_id, value in exemplars if value > WITHIN}

    assert until(lambda: slow_exemplars() & _slow_requests(site.receiver), 30, 1)


def _exemplars(
    prometheus: Prometheus, board: dict[str, Any], variables: dict[str, str]
) -> list[tuple[str, float]]:
    """Returns trace id and value of the exemplars in the panel of the alert's p99."""
    (expr,) = [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
        if panel["title"] == "Time to first token" and target["legendFormat"] == "p99"
    ]
    now = time.time()
    response = prometheus.client.get(
        "query_exemplars",
        query=resolve_variables(expr, "30s", **variables),
        start=f"{now - 300}",
        end=f"{now}",
    )
    return [
        (exemplar["labels"]["trace_id"], float(exemplar["value"]))
        for series in response
        for exemplar in series["exemplars"]
    ]


def _slow_requests(receiver: OtlpReceiver) -> set[str]:
    """Returns the trace ids of the request spans with a TTFT above the objective."""
    return {span["trace_id"] for span in receiver.spans if span["attributes"].get(semconv.TTFT, 0.0) > WITHIN}
