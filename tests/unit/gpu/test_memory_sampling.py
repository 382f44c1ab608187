"""Counters of the CUDA allocator, from a stand-in for `torch.cuda`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from otel_infer.gpu.memory import AllocatorCounters

S = 1_000_000_000


class Cuda:
    """The used part of `torch.cuda`. A query before initialization fails."""

    def __init__(self, devices: int = 1) -> None:
        self.initialized = True
        self.stats = [{"num_alloc_retries": 0, "num_ooms": 0, "allocation": {}} for _ in range(devices)]
        self.calls = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        assert self.initialized
        return len(self.stats)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self.initialized
        self.calls += 1
        return dict(self.stats[device])


class CounterPoller:
    """Polls the counters of an allocator at given instants (s)."""

    def __init__(self) -> None:
        self.at = 0
        self.marks: list[tuple[str, float, float, int]] = []
        self.allocator = AllocatorCounters(self._add_mark, lambda: self.at)

    def _add_mark(self, mark: str, since: int, at: int, count: int) -> None:
        self.marks.append((mark, since / S, at / S, count))

    def poll(self, at: float) -> list[tuple[str, float, float, int]]:
        self.at = round(at * S)
        self.allocator.record_increments()
        marks, self.marks = self.marks, []
        return marks


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    return cuda


def test_increments_since_the_last_poll_are_marks(cuda: Cuda) -> None:
    poller = CounterPoller()
    cuda.stats[0]["num_alloc_retries"] = 2
    assert poller.poll(3) == [("allocator_retry", 0, 3, 2)]
    assert poller.poll(5) == []
    cuda.stats[0].update(num_alloc_retries=3, num_ooms=1)
    assert poller.poll(7) == [("allocator_retry", 5, 7, 1), ("allocator_oom", 5, 7, 1)]


def test_counts_before_the_start_are_not_marks(cuda: Cuda) -> None:
    cuda.stats[0]["num_alloc_retries"] = 9
    assert CounterPoller().poll(2) == []


def test_counters_of_all_devices_are_summed(cuda: Cuda) -> None:
    cuda.stats.append(dict(cuda.stats[0]))
    poller = CounterPoller()
    for stats in cuda.stats:
        stats["num_alloc_retries"] = 1
    assert poller.poll(2) == [("allocator_retry", 0, 2, 2)]


def test_counters_are_polled_at_most_once_per_second(cuda: Cuda) -> None:
    poller = CounterPoller()
    calls = cuda.calls
    for tenth in range(1, 31):
        poller.poll(tenth / 10)
    assert cuda.calls - calls == 3


def test_uninitialized_cuda_counts_from_zero_without_queries(cuda: Cuda) -> None:
    cuda.initialized = False
    poller = CounterPoller()
    assert poller.poll(2) == []
    cuda.initialized = True
    cuda.stats[0]["num_ooms"] = 1
    assert poller.poll(4) == [("allocator_oom", 2, 4, 1)]


def test_partially_imported_torch_is_polled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    poller = CounterPoller()
    assert poller.poll(2) == []
    cuda = Cuda()
    cuda.stats[0]["num_ooms"] = 1
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    assert poller.poll(4) == [("allocator_oom", 2, 4, 1)]


def test_without_torch_nothing_is_polled_or_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    assert CounterPoller().poll(2) == []
    assert "torch.cuda" not in sys.modules
