"""The dashboards, built from the names that the code emits. Pure: who writes them to files is `cli.dashboards`.

A function of a dashboard is a row of it, as long as that has panels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from otel_infer.monitoring.dashboards import decode, gpu, latency_breakdown, memory, overview, self_monitoring
from otel_infer.monitoring.dashboards.dashboard import Board, dashboard

BOARDS: Sequence[Callable[[], Board]] = (
    overview.board,
    latency_breakdown.board,
    decode.board,
    memory.board,
    gpu.board,
    self_monitoring.board,
)


def built() -> dict[str, dict[str, Any]]:
    """The JSON of every dashboard, by the name of its file."""
    return {f"{board.name}.json": dashboard(board) for board in (make() for make in BOARDS)}
