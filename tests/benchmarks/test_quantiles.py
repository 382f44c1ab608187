"""Quantiles of a histogram, computed as Prometheus does."""

from __future__ import annotations

import random

import pytest

from benchmarks import quantiles
from otel_infer.export.metrics.histograms import ExponentialHistogram

# The expected values follow the rules of histogram_quantile: rank q × n, linear inside its bucket.
BOUNDS, COUNTS = (0.1, 0.2, 0.4), (10, 30, 40, 20)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.05, 0.05), (0.1, 0.1), (0.25, 0.15), (0.6, 0.3), (0.8, 0.4), (0.9, 0.4), (1.0, 0.4)],
)
def test_explicit_buckets_are_interpolated_linearly(q: float, expected: float) -> None:
    assert quantiles.explicit(BOUNDS, COUNTS, q) == pytest.approx(expected)


def test_an_empty_bucket_is_skipped() -> None:
    assert quantiles.explicit((1.0, 2.0, 3.0), (5, 0, 5, 0), 0.75) == pytest.approx(2.5)


def test_exponential_buckets_are_interpolated_logarithmically() -> None:
    # Scale 0: bucket 1 holds 2 < x ≤ 4, so half of it is 2 × √2.
    assert quantiles.exponential(0, 1, (10,), 0, 0.5) == pytest.approx(2 * 2**0.5)
    assert quantiles.exponential(0, 1, (10,), 0, 1.0) == pytest.approx(4)


def test_zeros_have_the_lowest_ranks() -> None:
    assert quantiles.exponential(0, 1, (10,), 10, 0.4) == 0
    assert quantiles.exponential(0, 1, (10,), 10, 0.75) == pytest.approx(2 * 2**0.5)


def test_an_empty_histogram_has_no_quantiles() -> None:
    with pytest.raises(ValueError, match="empty"):
        quantiles.explicit(BOUNDS, (0, 0, 0, 0), 0.5)


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.99, 5), (1.0, 5)])
def test_the_exact_quantile_is_one_of_the_values(q: float, expected: float) -> None:
    assert quantiles.exact([1, 2, 3, 4, 5], q) == expected


def test_a_quantile_errs_by_at_most_one_bucket() -> None:
    rng = random.Random(1)
    for _ in range(200):
        values = sorted(rng.paretovariate(1.5) * 0.01 for _ in range(rng.randrange(1, 400)))
        histogram = ExponentialHistogram()
        for value in values:
            histogram.record(value)
        point = histogram.make_point({}, 0, 0)
        allowed = quantiles.base_of(point.scale) * (1 + 1e-9)
        for q in (0.5, 0.9, 0.99, 0.999):
            estimate = quantiles.exponential(
                point.scale, point.positive.offset, point.positive.bucket_counts, point.zero_count, q
            )
            assert 1 / allowed <= estimate / quantiles.exact(values, q) <= allowed
