"""The slope of a series and its confidence interval."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.slope import fit_slope

AT = [float(second) for second in range(200)]


def make_noise(seed: int, size: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0, size) for _ in AT]


def test_a_straight_line_has_an_exact_slope() -> None:
    assert fit_slope(AT, [3 + 0.5 * at for at in AT]) == pytest.approx((0.5, 0.5, 0.5))


def test_a_constant_series_has_no_slope() -> None:
    assert fit_slope(AT, [7.0] * len(AT)) == (0, 0, 0)


def test_the_interval_of_noisy_growth_excludes_zero() -> None:
    fitted = fit_slope(AT, [0.05 * at + off for at, off in zip(AT, make_noise(1))])
    assert fitted.value == pytest.approx(0.05, rel=0.2)
    assert 0 < fitted.low < 0.05 < fitted.high


def test_the_interval_has_about_its_nominal_coverage() -> None:
    intervals = [fit_slope(AT, make_noise(seed)) for seed in range(300)]
    covered = sum(interval.low <= 0 <= interval.high for interval in intervals) / len(intervals)
    assert 0.9 < covered <= 1


def test_a_few_spikes_hardly_change_the_slope() -> None:
    spiked = [1000.0 if at % 40 == 0 else 0.5 * at for at in AT]
    assert fit_slope(AT, spiked).value == pytest.approx(0.5, rel=0.05)


def test_a_sawtooth_does_not_grow() -> None:
    """Garbage-collected memory has this shape."""
    sawtooth = [float(at % 23) for at in range(200)]
    fitted = fit_slope(AT, sawtooth)
    assert fitted.low <= 0 <= fitted.high


def test_too_few_points_give_no_slope() -> None:
    assert all(math.isnan(number) for number in fit_slope(AT[:3], AT[:3]))
    assert all(math.isnan(number) for number in fit_slope([], []))


def test_scaling_applies_to_value_and_bounds() -> None:
    fitted = fit_slope(AT, make_noise(2))
    assert fitted.scale_by(3600) == pytest.approx([3600 * number for number in fitted])
