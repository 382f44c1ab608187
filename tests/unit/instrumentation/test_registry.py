"""Loading of instrumentors that other distributions declare as entry points."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

EXTERNAL = Instrumentor("toy", "toy", ("toy",))


class EntryPoint:
    def __init__(self, loaded: Any) -> None:
        self.name, self.value, self._loaded = "toy", "toy:instrumentor", loaded

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [(object(), "TypeError"), (ImportError(), "ImportError"), (Instrumentor, "TypeError")],
)
def test_invalid_entry_point_is_logged_and_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loaded: Any, reason: str
) -> None:
    points = [EntryPoint(loaded), EntryPoint(EXTERNAL)]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: points)
    with caplog.at_level(logging.WARNING):
        instrumentors = registry.load_instrumentors()
    assert len(instrumentors) == len(registry.BUILTIN) + 1
    assert instrumentors[-1] is EXTERNAL
    assert [record.getMessage() for record in caplog.records] == [f"instrumentor toy is not loaded: {reason}"]


@pytest.mark.parametrize(
    ("arguments", "is_helper"),
    [
        (["python", "-u", "/lib/ray/dashboard/agent.py", "--port=1"], True),
        (["python", "-m", "ray.dashboard.agent"], True),
        (["python", "agent.py", "/lib/ray/dashboard/agent.py"], False),
        (["python", "-u", "/lib/ray/_private/workers/default_worker.py"], False),
    ],
)
def test_a_helper_program_is_known_by_module_or_path(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], is_helper: bool
) -> None:
    monkeypatch.setattr(registry.sys, "orig_argv", arguments)
    assert registry.runs_as_helper(registry.load_instrumentors()) == is_helper
