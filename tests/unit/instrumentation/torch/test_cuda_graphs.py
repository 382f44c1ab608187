"""Captures are pauses, against a stand-in for torch's graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.torch import cuda_graphs as ours
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.support.rings import Recording


class Graph:
    """`CUDAGraph` as far as it matters here."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.fails = fails

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._call(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> str:
        self._call("end")
        return "captured"

    def _call(self, said: str) -> None:
        self.called.append(said)
        if self.fails and said.startswith(self.fails):
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def hook() -> Hook:
    return Hook("stand-in")


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    monkeypatch.setattr(Graph, "capture_begin", ours.patch_capture_begin(Graph.capture_begin, hook))
    monkeypatch.setattr(Graph, "capture_end", ours.patch_capture_end(Graph.capture_end, hook))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *said: told.append(said))
    return told


def test_a_capture_is_a_pause_and_is_made_once(told: list[Any]) -> None:
    graph = Graph()
    graph.capture_begin("a pool", capture_error_mode="relaxed")
    assert told == []
    assert graph.capture_end() == "captured"
    ((cause, started_at, ended_at),) = told
    assert cause == "capture"
    assert 0 < started_at <= ended_at
    assert graph.called == ["begin a pool relaxed", "end"]


def test_a_capture_that_fails_at_its_end_is_a_pause_and_raises_what_it_raises(told: list[Any]) -> None:
    graph = Graph(fails="end")
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.capture_end()
    assert len(told) == 1


def test_a_capture_that_does_not_begin_is_none(told: list[Any]) -> None:
    with pytest.raises(RuntimeError):
        Graph(fails="begin").capture_begin()
    Graph().capture_end()
    assert told == []


def test_captures_of_two_threads_are_two(told: list[Any]) -> None:
    def captures(between: Callable[[], object]) -> None:
        graph = Graph()
        graph.capture_begin()
        between()
        graph.capture_end()

    both = threading.Barrier(2, timeout=10)
    threads = [threading.Thread(target=captures, args=(both.wait,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(told) == 2


def test_what_was_taken_off_says_nothing(told: list[Any], hook: Hook) -> None:
    hook.alive = False
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    assert told == []
    assert graph.called == ["begin None global", "end"]


# ── the allocator ────────────────────────────────────────────────────────────────────────────────────────────────


class Allocator:
    """One that counts how often it is looked at."""

    def __init__(self, say: Any, fails: bool = False) -> None:
        self.looks, self.fails = 0, fails

    def record_increments(self) -> None:
        self.looks += 1
        if self.fails:
            raise KeyError("num_alloc_retries")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator(None)
    monkeypatch.setattr(ours, "AllocatorCounters", lambda say: allocator)
    ours.instrumentor.install()
    yield allocator
    ours.instrumentor.remove()


def ends() -> None:
    """A request."""
    recording = Recording()
    try:
        request = start.open_request("POST", owner="test")
        assert request is not None
        request.close()
        assert len(recording.records()) == 1
    finally:
        recording.stop()


def test_the_allocator_is_looked_at_when_a_request_ends(allocator: Allocator) -> None:
    ends()
    assert allocator.looks == 1
    ours.instrumentor.remove()
    ends()
    assert allocator.looks == 1


def test_one_that_cannot_be_read_is_looked_at_once_and_the_request_ends(allocator: Allocator) -> None:
    allocator.fails = True
    ends()
    ends()
    assert allocator.looks == 1
