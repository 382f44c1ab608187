"""The sidecar stays within its overhead budget by exporting fewer step spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_infer.config.budget import DEFAULT_BUDGET, OverheadBudget, parse_budget
from otel_infer.sidecar.overhead import MIN_SHARE, OverheadGovernor

SECOND = 1_000_000_000


def run(governor: OverheadGovernor, seconds: int, cpu: float, memory: int = 0, begin: int = 1) -> list[float]:
    """Returns the share after each second at the given CPU use (cores) and memory (bytes)."""
    return [
        governor.update_share((begin + n) * SECOND, round((begin + n) * cpu * SECOND), memory)
        for n in range(seconds)
    ]


def test_below_the_budget_the_share_is_one() -> None:
    assert set(run(OverheadGovernor(OverheadBudget(0.25, 100)), 60, cpu=0.2, memory=90)) == {1.0}


def test_a_short_burst_does_not_reduce_the_share() -> None:
    assert run(OverheadGovernor(OverheadBudget(0.25, 100)), 5, cpu=5.0) == [1.0] * 5


def test_above_the_budget_the_share_falls_to_minimum() -> None:
    shares = run(OverheadGovernor(OverheadBudget(0.25, 100)), 300, cpu=0.5)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == MIN_SHARE


def test_memory_above_the_budget_reduces_the_share() -> None:
    assert run(OverheadGovernor(OverheadBudget(0.25, 100)), 20, cpu=0.0, memory=101)[-1] < 0.5


def test_the_share_recovers_when_the_load_falls() -> None:
    governor = OverheadGovernor(OverheadBudget(0.25, 100))
    run(governor, 60, cpu=0.5)
    reduced = governor.share
    governor._cpu_before = 0
    shares = run(governor, 300, cpu=0.0, begin=100)
    assert reduced < 0.1 and shares[-1] == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**9)), max_size=50)
)
def test_the_share_stays_between_minimum_and_one(history: list[tuple[int, int, int]]) -> None:
    governor, now, cpu = OverheadGovernor(DEFAULT_BUDGET), 0, 0
    for gap, used, memory in history:
        now, cpu = now + gap, cpu + used
        assert MIN_SHARE <= governor.update_share(now, cpu, memory) <= 1


def test_a_budget_is_parsed_from_text() -> None:
    assert parse_budget("cpu=5%,memory=64MiB") == OverheadBudget(0.05, 64 << 20)
    assert parse_budget("memory=1GiB") == OverheadBudget(DEFAULT_BUDGET.cpu_cores, 1 << 30)


@pytest.mark.parametrize("text", ["cpu=5", "5%", "memory=64MB", "cpu=0%", ""])
def test_an_invalid_budget_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="cpu=25%"):
        parse_budget(text)
