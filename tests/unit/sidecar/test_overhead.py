"""The reading side keeps to what it may take, by making fewer step spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_infer.config.budget import DEFAULT_BUDGET, OverheadBudget, parse_budget
from otel_infer.sidecar.overhead import MIN_SHARE, OverheadGovernor

SECOND = 1_000_000_000


def run(governor: OverheadGovernor, seconds: int, cpu: float, memory: int = 0, begin: int = 1) -> list[float]:
    """The share after each second of using so much of a core."""
    return [
        governor.update_share((begin + n) * SECOND, round((begin + n) * cpu * SECOND), memory)
        for n in range(seconds)
    ]


def test_below_what_it_may_take_nothing_is_shed() -> None:
    assert set(run(OverheadGovernor(OverheadBudget(0.25, 100)), 60, cpu=0.2, memory=90)) == {1.0}


def test_a_burst_is_not_a_state() -> None:
    assert run(OverheadGovernor(OverheadBudget(0.25, 100)), 5, cpu=5.0) == [1.0] * 5


def test_above_it_more_and_more_is_shed_but_never_all() -> None:
    shares = run(OverheadGovernor(OverheadBudget(0.25, 100)), 300, cpu=0.5)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == MIN_SHARE


def test_memory_counts_too() -> None:
    assert run(OverheadGovernor(OverheadBudget(0.25, 100)), 20, cpu=0.0, memory=101)[-1] < 0.5


def test_detail_comes_back_when_it_is_calm() -> None:
    governor = OverheadGovernor(OverheadBudget(0.25, 100))
    run(governor, 60, cpu=0.5)
    low = governor.share
    governor._cpu_before = 0
    back = run(governor, 300, cpu=0.0, begin=100)
    assert low < 0.1 and back[-1] == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**9)), max_size=50)
)
def test_the_share_is_a_share_whatever_is_observed(history: list[tuple[int, int, int]]) -> None:
    governor, now, cpu = OverheadGovernor(DEFAULT_BUDGET), 0, 0
    for gap, used, memory in history:
        now, cpu = now + gap, cpu + used
        assert MIN_SHARE <= governor.update_share(now, cpu, memory) <= 1


def test_what_may_be_taken_is_said_in_words() -> None:
    assert parse_budget("cpu=5%,memory=64MiB") == OverheadBudget(0.05, 64 << 20)
    assert parse_budget("memory=1GiB") == OverheadBudget(DEFAULT_BUDGET.cpu_cores, 1 << 30)


@pytest.mark.parametrize("text", ["cpu=5", "5%", "memory=64MB", "cpu=0%", ""])
def test_what_is_not_understood_says_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match="like cpu=25%,memory=256MiB"):
        parse_budget(text)
