"""What the CUDA allocator counts, from a stand-in for `torch.cuda`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from otel_infer.gpu.memory import AllocatorCounters

S = 1_000_000_000


class Cuda:
    """`torch.cuda` as far as it matters here: asked before it is initialized, it fails."""

    def __init__(self, devices: int = 1) -> None:
        self.initialized = True
        self.stats = [{"num_alloc_retries": 0, "num_ooms": 0, "allocation": {}} for _ in range(devices)]
        self.asked = 0

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        assert self.initialized
        return len(self.stats)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self.initialized
        self.asked += 1
        return dict(self.stats[device])


class Watched:
    """An allocator that is looked at, at instants that are given in s."""

    def __init__(self) -> None:
        self.at = 0
        self.told: list[tuple[str, float, float, int]] = []
        self.allocator = AllocatorCounters(self._say, lambda: self.at)

    def _say(self, mark: str, since: int, at: int, count: int) -> None:
        self.told.append((mark, since / S, at / S, count))

    def look(self, at: float) -> list[tuple[str, float, float, int]]:
        self.at = round(at * S)
        self.allocator.record_increments()
        told, self.told = self.told, []
        return told


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    return cuda


def test_what_was_added_since_the_last_look_is_a_mark(cuda: Cuda) -> None:
    watched = Watched()
    cuda.stats[0]["num_alloc_retries"] = 2
    assert watched.look(3) == [("allocator_retry", 0, 3, 2)]
    assert watched.look(5) == []
    cuda.stats[0].update(num_alloc_retries=3, num_ooms=1)
    assert watched.look(7) == [("allocator_retry", 5, 7, 1), ("allocator_oom", 5, 7, 1)]


def test_what_was_there_before_us_is_not_news(cuda: Cuda) -> None:
    cuda.stats[0]["num_alloc_retries"] = 9
    assert Watched().look(2) == []


def test_all_devices_are_looked_at(cuda: Cuda) -> None:
    cuda.stats.append(dict(cuda.stats[0]))
    watched = Watched()
    for stats in cuda.stats:
        stats["num_alloc_retries"] = 1
    assert watched.look(2) == [("allocator_retry", 0, 2, 2)]


def test_it_is_looked_at_once_a_second_at_most(cuda: Cuda) -> None:
    watched = Watched()
    asked = cuda.asked
    for tenth in range(1, 31):
        watched.look(tenth / 10)
    assert cuda.asked - asked == 3


def test_cuda_that_nobody_uses_is_not_asked_and_its_first_figures_are_news(cuda: Cuda) -> None:
    cuda.initialized = False
    watched = Watched()
    assert watched.look(2) == []
    cuda.initialized = True
    cuda.stats[0]["num_ooms"] = 1
    assert watched.look(4) == [("allocator_oom", 2, 4, 1)]


def test_torch_that_is_being_imported_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    watched = Watched()
    assert watched.look(2) == []
    cuda = Cuda()
    cuda.stats[0]["num_ooms"] = 1
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    assert watched.look(4) == [("allocator_oom", 2, 4, 1)]


def test_without_torch_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    assert Watched().look(2) == []
    assert "torch.cuda" not in sys.modules
