"""How fast something grows, and how sure that is."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.slope import slope

AT = [float(second) for second in range(200)]


def noise(seed: int, size: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0, size) for _ in AT]


def test_a_straight_line_has_its_slope_and_no_doubt() -> None:
    assert slope(AT, [3 + 0.5 * at for at in AT]) == pytest.approx((0.5, 0.5, 0.5))


def test_what_stays_the_same_does_not_grow() -> None:
    assert slope(AT, [7.0] * len(AT)) == (0, 0, 0)


def test_growth_under_noise_is_found_and_its_interval_leaves_zero_out() -> None:
    found = slope(AT, [0.05 * at + off for at, off in zip(AT, noise(1))])
    assert found.value == pytest.approx(0.05, rel=0.2)
    assert 0 < found.low < 0.05 < found.high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    found = [slope(AT, noise(seed)) for seed in range(300)]
    held = sum(one.low <= 0 <= one.high for one in found) / len(found)
    assert 0.9 < held <= 1


def test_a_few_spikes_change_next_to_nothing() -> None:
    spiked = [1000.0 if at % 40 == 0 else 0.5 * at for at in AT]
    assert slope(AT, spiked).value == pytest.approx(0.5, rel=0.05)


def test_a_saw_that_falls_back_does_not_grow() -> None:
    """Memory that is collected from time to time."""
    saw = [float(at % 23) for at in range(200)]
    found = slope(AT, saw)
    assert found.low <= 0 <= found.high


def test_from_a_handful_of_points_nothing_is_said() -> None:
    assert all(math.isnan(number) for number in slope(AT[:3], AT[:3]))
    assert all(math.isnan(number) for number in slope([], []))


def test_all_slopes_have_the_unit_of_the_estimate() -> None:
    found = slope(AT, noise(2))
    assert found.scaled(3600) == pytest.approx([3600 * number for number in found])
