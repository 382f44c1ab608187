"""Builds the dashboards from the metric names that the code emits. Pure: `cli.dashboards` writes the files.

In the module of a dashboard, each row of panels is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from otel_infer.monitoring.dashboards import (
    decode,
    gpu,
    latency_breakdown,
    memory,
    overview,
    self_monitoring,
    services,
)
from otel_infer.monitoring.dashboards.dashboard import Dashboard, render_dashboard

DASHBOARD_BUILDERS: Sequence[Callable[[], Dashboard]] = (
    overview.build_dashboard,
    latency_breakdown.build_dashboard,
    decode.build_dashboard,
    services.build_dashboard,
    memory.build_dashboard,
    gpu.build_dashboard,
    self_monitoring.build_dashboard,
)


def build_dashboards() -> dict[str, dict[str, Any]]:
    """Returns the JSON of every dashboard, by file name."""
    return {
        f"{board.name}.json": render_dashboard(board) for board in (make() for make in DASHBOARD_BUILDERS)
    }
