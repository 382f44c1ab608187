"""Three faults, each in its own server, raise their panels. A healthy server's panels do not rise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from tests.stack.load import Load, loop_client
from tests.stack.processes import Prometheus, until
from tests.stack.running import loop_server, make_environ
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

LOAD_S, WINDOW = 30, "25s"
HEALTHY: dict[str, float] = {"max_batch": 16, "base_ms": 6, "longest_prompt": 101}
SERVERS: dict[str, dict[str, float]] = {
    "healthy": {},
    "queue": {"max_batch": 2},
    "kv": {"kv_blocks": 16, "preempted_ms": 50},
    "gc": {"gc_every_ms": 400, "gc_objects": 400_000},
}
"""Each server is healthy except for the fault in its name."""
TIMES = 5
"""The factor by which a fault raises its panel above the healthy server's."""


class Panel(NamedTuple):
    """The panel that shows a fault: dashboard, title, legend and labels of the line."""

    file: str
    title: str
    legend: str
    labels: dict[str, str]


PANELS = {
    "queue": Panel("latency-breakdown.json", "Queue: quantiles", "p95", {}),
    "kv": Panel("memory.json", "Preemptions per request", "preemptions", {}),
    "gc": Panel(
        "decode.json", "Decode delay by cause", "{{infer_latency_cause}}", {"infer_latency_cause": "gc"}
    ),
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    tool("prometheus")
    folder: Path = tmp_path_factory.mktemp("faults")
    with OtlpReceiver() as receiver, ExitStack() as running:
        targets: dict[str, int] = {}
        clients = []
        for name, fault in SERVERS.items():
            targets[name], environ = make_environ(receiver, OTEL_INFER_GPU_METRICS="off")
            server = loop_server(folder / f"{name}.log", environ, **{**HEALTHY, **fault})
            running.callback(lambda started=server: started.process and started.stop())
            server.start()
            clients.append(loop_client(server.port))
        prometheus = Prometheus(folder, targets)
        running.callback(prometheus.stop)
        for client in clients:
            running.callback(Load(client, 6, 0.3).stop)
        time.sleep(LOAD_S)
        yield prometheus


def read_panel(prometheus: Prometheus, panel: Panel) -> dict[str, float]:
    """Returns the panel's value for each server."""
    (expr,) = [
        target["expr"]
        for drawn in dashboards.build_dashboards()[panel.file]["panels"]
        for target in (drawn.get("targets", ()) if drawn["title"] == panel.title else ())
        if target["legendFormat"] == panel.legend
    ]
    return {
        name: prometheus.value(resolve_variables(expr, WINDOW, job=name), **panel.labels) for name in SERVERS
    }


@pytest.mark.parametrize("fault", PANELS)
def test_a_fault_raises_its_panel_above_other_servers(prometheus: Prometheus, fault: str) -> None:
    def is_raised() -> bool:
        values = read_panel(prometheus, PANELS[fault])
        return values[fault] > TIMES * values["healthy"] and values[fault] == max(values.values())

    # A busy machine needs longer until all servers have been scraped often enough.
    assert until(is_raised, 60, 3), read_panel(prometheus, PANELS[fault])
