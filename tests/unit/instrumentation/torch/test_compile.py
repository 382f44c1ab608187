"""Compilations are pauses, against a stand-in for the handler that torch tells of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.torch import compile as ours
from otel_infer.ringbuffer.recorder import recorder


class Handler:
    """`CompilationCallbackHandler` as far as it matters here: who asked is told of the outermost compilation."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.depth = 0

    def run_start_callbacks(self, args: str) -> None:
        self.told.append(f"start {args}")

    def run_end_callbacks(self, args: str) -> None:
        self.told.append(f"end {args}")

    def compiles(self, work: Callable[[], None] = lambda: None) -> None:
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
        Handler, "run_start_callbacks", ours.patch_start_callbacks(Handler.run_start_callbacks, hook)
    )
    monkeypatch.setattr(
        Handler, "run_end_callbacks", ours.patch_end_callbacks(Handler.run_end_callbacks, hook)
    )
    yield Handler()
    ours._current.started_at = 0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *said: told.append(said))
    return told


def test_a_compilation_is_a_pause_and_its_callbacks_are_called_once(
    handler: Handler, told: list[Any]
) -> None:
    handler.compiles()
    ((cause, started_at, ended_at),) = told
    assert cause == "compile"
    assert 0 < started_at <= ended_at
    assert handler.told == ["start 0/0", "end 0/0"]


def test_a_compilation_inside_another_is_a_part_of_it(handler: Handler, told: list[Any]) -> None:
    handler.compiles(lambda: handler.compiles(handler.compiles))
    assert len(told) == 1


def test_a_compilation_that_fails_is_a_pause_too(handler: Handler, told: list[Any]) -> None:
    def fails() -> None:
        raise ValueError("no graph")

    with pytest.raises(ValueError, match="no graph"):
        handler.compiles(fails)
    assert len(told) == 1


def test_of_a_compilation_that_began_before_we_came_nothing_is_said(
    handler: Handler, told: list[Any]
) -> None:
    handler.run_end_callbacks("0/0")
    assert told == []


def test_what_was_taken_off_says_nothing(handler: Handler, told: list[Any], hook: Hook) -> None:
    hook.alive = False
    handler.compiles()
    assert told == []
    assert handler.told == ["start 0/0", "end 0/0"]
