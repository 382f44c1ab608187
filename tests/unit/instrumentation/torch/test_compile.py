"""Compilations are pauses; tested with a stand-in for the compilation callback handler of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.torch import compile as compile_hooks
from otel_infer.ringbuffer.recorder import recorder


class Handler:
    """Stand-in for `CompilationCallbackHandler`: runs the callbacks of the outermost compilation."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.depth = 0

    def run_start_callbacks(self, args: str) -> None:
        self.calls.append(f"start {args}")

    def run_end_callbacks(self, args: str) -> None:
        self.calls.append(f"end {args}")

    def compile(self, work: Callable[[], None] = lambda: None) -> None:
        self.depth += 1
        try:
            if self.depth == 1:
                self.run_start_callbacks("0/0")
            work()
        finally:
            if self.depth == 1:
                self.run_end_callbacks("0/0")
            self.depth -= 1


@pytest.fixture
def hook() -> Hook:
    return Hook("stand-in")


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> Iterator[Handler]:
    monkeypatch.setattr(
        Handler, "run_start_callbacks", compile_hooks.patch_start_callbacks(Handler.run_start_callbacks, hook)
    )
    monkeypatch.setattr(
        Handler, "run_end_callbacks", compile_hooks.patch_end_callbacks(Handler.run_end_callbacks, hook)
    )
    yield Handler()
    compile_hooks._current.started_at = 0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    pauses: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *pause: pauses.append(pause))
    return pauses


def test_compilation_is_a_pause_and_runs_callbacks_once(handler: Handler, pauses: list[Any]) -> None:
    handler.compile()
    ((cause, started_at, ended_at),) = pauses
    assert cause == "compile"
    assert 0 < started_at <= ended_at
    assert handler.calls == ["start 0/0", "end 0/0"]


def test_nested_compilation_belongs_to_the_outer_pause(handler: Handler, pauses: list[Any]) -> None:
    handler.compile(lambda: handler.compile(handler.compile))
    assert len(pauses) == 1


def test_failed_compilation_is_a_pause(handler: Handler, pauses: list[Any]) -> None:
    def fails() -> None:
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        handler.compile(fails)
    assert len(pauses) == 1


def test_compilation_started_before_install_is_not_recorded(handler: Handler, pauses: list[Any]) -> None:
    handler.run_end_callbacks("0/0")
    assert pauses == []


def test_removed_hook_records_nothing(handler: Handler, pauses: list[Any], hook: Hook) -> None:
    hook.alive = False
    handler.compile()
    assert pauses == []
    assert handler.calls == ["start 0/0", "end 0/0"]
