"""The dashboards, built from the names that the code emits. Pure: who writes them to files is `cli.dashboards`.

A function of a dashboard is a row of it, as long as that has panels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from otel_infer.monitoring.dashboards import decode, gpu, latency_breakdown, memory, overview, self_monitoring
from otel_infer.monitoring.dashboards.dashboard import Dashboard, render_dashboard

DASHBOARD_BUILDERS: Sequence[Callable[[], Dashboard]] = (
    overview.build_dashboard,
    latency_breakdown.build_dashboard,
    decode.build_dashboard,
    memory.build_dashboard,
    gpu.build_dashboard,
    self_monitoring.build_dashboard,
)


def build_dashboards() -> dict[str, dict[str, Any]]:
    """The JSON of every dashboard, by the name of its file."""
    return {
        f"{board.name}.json": render_dashboard(board) for board in (make() for make in DASHBOARD_BUILDERS)
    }
