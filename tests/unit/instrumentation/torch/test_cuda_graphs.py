"""CUDA graph captures are pauses; tested with a stand-in for the graphs of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.torch import cuda_graphs as graph_hooks
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.support.rings import Recording


class Graph:
    """Stand-in for `CUDAGraph`."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self.fails = fails

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._call(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> str:
        self._call("end")
        return "captured"

    def _call(self, call: str) -> None:
        self.called.append(call)
        if self.fails and call.startswith(self.fails):
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def hook() -> Hook:
    return Hook("stand-in")


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    monkeypatch.setattr(Graph, "capture_begin", graph_hooks.patch_capture_begin(Graph.capture_begin, hook))
    monkeypatch.setattr(Graph, "capture_end", graph_hooks.patch_capture_end(Graph.capture_end, hook))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    pauses: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *pause: pauses.append(pause))
    return pauses


def test_capture_is_a_pause_and_runs_once(pauses: list[Any]) -> None:
    graph = Graph()
    graph.capture_begin("a pool", capture_error_mode="relaxed")
    assert pauses == []
    assert graph.capture_end() == "captured"
    ((cause, started_at, ended_at),) = pauses
    assert cause == "capture"
    assert 0 < started_at <= ended_at
    assert graph.called == ["begin a pool relaxed", "end"]


def test_failed_capture_is_a_pause_and_raises(pauses: list[Any]) -> None:
    graph = Graph(fails="end")
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.capture_end()
    assert len(pauses) == 1


def test_capture_that_cannot_begin_is_not_recorded(pauses: list[Any]) -> None:
    with pytest.raises(RuntimeError):
        Graph(fails="begin").capture_begin()
    Graph().capture_end()
    assert pauses == []


def test_captures_of_two_threads_are_two_pauses(pauses: list[Any]) -> None:
    def capture(between: Callable[[], object]) -> None:
        graph = Graph()
        graph.capture_begin()
        between()
        graph.capture_end()

    both = threading.Barrier(2, timeout=10)
    threads = [threading.Thread(target=capture, args=(both.wait,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(pauses) == 2


def test_removed_hook_records_nothing(pauses: list[Any], hook: Hook) -> None:
    hook.alive = False
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    assert pauses == []
    assert graph.called == ["begin None global", "end"]


# ── the allocator ────────────────────────────────────────────────────────────────────────────────────────────────


class Allocator:
    """Counts how often it is read."""

    def __init__(self, record: Any, fails: bool = False) -> None:
        self.reads, self.fails = 0, fails

    def record_increments(self) -> None:
        self.reads += 1
        if self.fails:
            raise KeyError("num_alloc_retries")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator(None)
    monkeypatch.setattr(graph_hooks, "AllocatorCounters", lambda record: allocator)
    graph_hooks.instrumentor.install()
    yield allocator
    graph_hooks.instrumentor.remove()


def run_request() -> None:
    """Opens and closes one request."""
    recording = Recording()
    recorder._deferred_due_at = 0  # another test's request may have ended just now
    try:
        request = start.open_request("POST", owner="test")
        assert request is not None
        request.close()
        assert len(recording.records()) == 1
    finally:
        recording.stop()


def test_allocator_counters_are_read_at_request_end(allocator: Allocator) -> None:
    run_request()
    assert allocator.reads == 1
    graph_hooks.instrumentor.remove()
    run_request()
    assert allocator.reads == 1


def test_unreadable_allocator_is_read_once(allocator: Allocator) -> None:
    allocator.fails = True
    run_request()
    run_request()
    assert allocator.reads == 1
