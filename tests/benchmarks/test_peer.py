"""A benchmark block on transformers: how many requests it adds, and that it waits for all."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peer import AT_ONCE, TOKENS, Model


class Manager:
    """A continuous batching manager with immediate results. It counts its concurrent requests."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.most = self.added = 0

    def add_request(self, prompt: list[int], max_new_tokens: int) -> None:
        self.waiting.append(SimpleNamespace(error=None, generated_tokens=[0] * max_new_tokens))
        self.added, self.most = self.added + 1, max(self.most, len(self.waiting))

    def get_result(self, timeout: float) -> Any:
        return self.waiting.popleft() if self.waiting else None


@pytest.mark.parametrize("requests", [1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_a_batching_block_waits_for_all_its_requests(requests: int) -> None:
    """At most `AT_ONCE` requests are in flight."""
    model = Model.__new__(Model)
    model.manager = Manager()
    assert model.run_batching(requests) == requests * TOKENS
    assert (model.manager.added, model.manager.most) == (requests, min(requests, AT_ONCE))
    assert not model.manager.waiting
