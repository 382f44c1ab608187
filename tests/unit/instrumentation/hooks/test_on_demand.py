"""A patch on demand counts as installed, and replaces its target only once it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.patch import OnDemandPatch
from otel_infer.instrumentation.hooks.probe import Hook


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("library_on_demand")
    module.double = lambda number: 2 * number
    monkeypatch.setitem(sys.modules, "library_on_demand", module)
    return module


def count_calls(calls: list[int]) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def double(number: int) -> Any:
            calls.append(number)
            return original(number)

        return double

    return make


def make_patch(calls: list[int]) -> tuple[Instrumentor, OnDemandPatch]:
    instrumentor = Instrumentor("test", "test", ("library_on_demand",))
    return instrumentor, instrumentor.patch_on_demand("library_on_demand:double", count_calls(calls))


def test_the_target_is_replaced_by_the_first_demand(library: Any) -> None:
    calls: list[int] = []
    instrumentor, patch = make_patch(calls)
    bare = library.double
    instrumentor.install()
    assert library.double is bare and patch.active and instrumentor.status.hooks_active == 1
    patch.demand()
    patch.demand()
    assert library.double(4) == 8 and calls == [4]
    instrumentor.remove()
    assert library.double is bare and not patch.active


def test_a_demand_outlasts_a_removal(library: Any) -> None:
    calls: list[int] = []
    instrumentor, patch = make_patch(calls)
    patch.demand()  # before it is installed
    instrumentor.install()
    assert library.double(1) == 2 and calls == [1]
    instrumentor.remove()
    assert library.double(2) == 4 and calls == [1]
    instrumentor.install()
    assert library.double(3) == 6 and calls == [1, 3]
    instrumentor.remove()


def test_a_missing_target_is_reported_before_any_demand(library: Any) -> None:
    instrumentor, _ = make_patch([])
    del library.double
    instrumentor.install()
    assert instrumentor.status.state == "drifted"
    instrumentor.remove()
