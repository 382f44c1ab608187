"""Verdicts of a gate in µs on a slow machine."""

from __future__ import annotations

import pytest

from benchmarks import hooks
from benchmarks.hooks import Case, Samples

BEST_NS = 40.0


def make_case(gate_ns: float) -> Case:
    return Case("a step", gate_ns, lambda steps: None, lambda steps: None)


@pytest.mark.parametrize(
    ("taken_ns", "slower", "verdict"),
    [
        (900, 1.0, "pass"),
        (900, 1.6, "pass"),
        (1300, 1.0, "fail"),
        (1300, 1.6, "inconclusive"),
        (2000, 1.6, "fail"),
    ],
    ids=["fast pass", "slow pass", "fast fail", "fail from slowness", "fail despite slowness"],
)
def test_a_slow_machine_turns_failures_into_inconclusive(
    taken_ns: float, slower: float, verdict: str
) -> None:
    bare = [500.0] * 9
    measured = Samples(bare, [500 + taken_ns] * 9, bare, [BEST_NS * slower] * 9)
    assert hooks.make_case_line(make_case(1000), measured, BEST_NS).verdict == verdict


def test_a_pass_needs_equal_bare_runs() -> None:
    measured = Samples([500.0] * 9, [1000.0] * 9, [600.0] * 9, [BEST_NS] * 9)
    assert hooks.make_case_line(make_case(1000), measured, BEST_NS).verdict == "inconclusive"


@pytest.mark.parametrize(("gate_ns", "verdict"), [(200, "pass"), (105, "inconclusive")])
def test_a_difference_of_some_ns_counts_where_it_could_change_the_verdict(
    gate_ns: float, verdict: str
) -> None:
    measured = Samples([500.0] * 9, [605.0] * 9, [510.0] * 9, [BEST_NS] * 9)
    assert hooks.make_case_line(make_case(gate_ns), measured, BEST_NS).verdict == verdict
