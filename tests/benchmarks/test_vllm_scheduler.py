"""The gates of the section about vLLM's scheduler."""

from __future__ import annotations

import math

import pytest

from benchmarks import verdict
from benchmarks.vllm_scheduler import MAX_SHARE, ROUNDS, Turn, make_lines

COLD, WARM = Turn(8, changes=False, uses_caches=True), Turn(8, changes=False, uses_caches=False)


def make_costs(share: float, spread: float = 0.0, unit: float = 1.0) -> list[tuple[float, float, float]]:
    return [(share + spread * (number % 2), 1.0, unit) for number in range(ROUNDS)]


@pytest.mark.parametrize(
    ("share", "spread", "expected"),
    [(0.4, 0.0, verdict.PASS), (0.7, 0.0, verdict.FAIL), (MAX_SHARE - 0.1, 0.4, verdict.FAIL)],
)
def test_share_of_the_older_release_fails_by_its_upper_bound(
    share: float, spread: float, expected: str
) -> None:
    (line,) = make_lines(COLD, make_costs(share, spread))
    assert line.verdict == expected


def test_warm_hooks_are_a_multiple_of_the_unit() -> None:
    multiple, share = make_lines(WARM, make_costs(0.5, unit=0.1))
    assert (multiple.value, multiple.verdict, share.verdict) == (5.0, verdict.FAIL, verdict.INFORMATION)


def test_without_an_older_release_there_is_no_share() -> None:
    costs = [(0.5, math.nan, 0.2)] * ROUNDS
    assert make_lines(COLD, costs) == []
    assert [line.verdict for line in make_lines(WARM, costs)] == [verdict.PASS]
