"""A gate in µs on a machine that is not at its best."""

from __future__ import annotations

import pytest

from benchmarks import hooks
from benchmarks.hooks import Case, Found

BEST = 40.0


def case_at(gate_ns: float) -> Case:
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
    ids=["passed", "passed though slow", "failed", "failed for being slow", "failed at its best too"],
)
def test_a_slow_machine_spoils_a_failure_that_is_its_own_and_no_pass(
    taken_ns: float, slower: float, verdict: str
) -> None:
    bare = [500.0] * 9
    found = Found(bare, [500 + taken_ns] * 9, bare, [BEST * slower] * 9)
    assert hooks._line(case_at(1000), found, BEST).verdict == verdict


def test_bare_against_bare_must_agree_for_a_pass() -> None:
    found = Found([500.0] * 9, [1000.0] * 9, [600.0] * 9, [BEST] * 9)
    assert hooks._line(case_at(1000), found, BEST).verdict == "inconclusive"
