"""Three faults, each in a server of its own: each moves its panel, and nothing moves in one that is well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from tests.stack.load import Load, loop
from tests.stack.processes import Prometheus, until
from tests.stack.running import loop_server, scraped
from tests.stack.tools import tool
from tests.support.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

LOAD_S, WINDOW = 30, "25s"
WELL: dict[str, float] = {"max_batch": 16, "base_ms": 6, "longest_prompt": 101}
SERVERS: dict[str, dict[str, float]] = {
    "well": {},
    "queue": {"max_batch": 2},
    "kv": {"kv_blocks": 16, "preempted_ms": 50},
    "gc": {"gc_every_ms": 400, "gc_objects": 400_000},
}
"""Each is well but for what its name says."""
TIMES = 5
"""As much as where nothing is wrong; and more than with any other fault."""


class Panel(NamedTuple):
    """Where a fault is seen: dashboard, panel, legend and labels of the line."""

    file: str
    title: str
    legend: str
    labels: dict[str, str]


PANELS = {
    "queue": Panel("anatomy.json", "Queue: quantiles", "p95", {}),
    "kv": Panel("memory.json", "Preemptions per request", "preemptions", {}),
    "gc": Panel("decode.json", "What held them up", "{{infer_latency_cause}}", {"infer_latency_cause": "gc"}),
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    tool("prometheus")
    folder: Path = tmp_path_factory.mktemp("faults")
    with OtlpReceiver() as receiver, ExitStack() as running:
        targets: dict[str, int] = {}
        loads = []
        for name, fault in SERVERS.items():
            targets[name], environ = scraped(receiver, OTEL_INFER_GPU_METRICS="off")
            server = loop_server(folder / f"{name}.log", environ, **{**WELL, **fault})
            running.callback(lambda one=server: one.process and one.stop())
            server.start()
            loads.append(loop(server.port))
        made = Prometheus(folder, targets)
        running.callback(made.stop)
        for load in loads:
            running.callback(Load(load, 6, 0.3).stop)
        time.sleep(LOAD_S)
        yield made


def seen(prometheus: Prometheus, panel: Panel) -> dict[str, float]:
    """By server: what its panel shows."""
    (expr,) = [
        target["expr"]
        for one in dashboards.build_dashboards()[panel.file]["panels"]
        for target in (one.get("targets", ()) if one["title"] == panel.title else ())
        if target["legendFormat"] == panel.legend
    ]
    return {
        name: prometheus.value(resolve_variables(expr, WINDOW, job=name), **panel.labels) for name in SERVERS
    }


@pytest.mark.parametrize("fault", PANELS)
def test_a_fault_moves_its_panel_and_no_other_server_does(prometheus: Prometheus, fault: str) -> None:
    def moved() -> bool:
        values = seen(prometheus, PANELS[fault])
        return values[fault] > TIMES * values["well"] and values[fault] == max(values.values())

    # Where much runs at once it takes longer until all servers have been scraped often enough.
    assert until(moved, 60, 3), seen(prometheus, PANELS[fault])
