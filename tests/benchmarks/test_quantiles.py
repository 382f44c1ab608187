"""Quantiles as Prometheus reads them off a histogram."""

from __future__ import annotations

import random

import pytest

from benchmarks import quantiles
from otel_infer.export.metrics.histograms import ExponentialHistogram

# Each is worked out by the rules of histogram_quantile: rank q × n, linear inside the bucket it falls into.
BOUNDS, COUNTS = (0.1, 0.2, 0.4), (10, 30, 40, 20)


@pytest.mark.parametrize(
    ("q", "said"),
    [(0.05, 0.05), (0.1, 0.1), (0.25, 0.15), (0.6, 0.3), (0.8, 0.4), (0.9, 0.4), (1.0, 0.4)],
)
def test_explicit_buckets_are_read_by_linear_interpolation(q: float, said: float) -> None:
    assert quantiles.explicit(BOUNDS, COUNTS, q) == pytest.approx(said)


def test_an_empty_bucket_is_stepped_over() -> None:
    assert quantiles.explicit((1.0, 2.0, 3.0), (5, 0, 5, 0), 0.75) == pytest.approx(2.5)


def test_exponential_buckets_are_read_by_interpolation_of_the_logarithm() -> None:
    # Scale 0: bucket 1 holds 2 < x ≤ 4, so half of it is 2 × √2.
    assert quantiles.exponential(0, 1, (10,), 0, 0.5) == pytest.approx(2 * 2**0.5)
    assert quantiles.exponential(0, 1, (10,), 0, 1.0) == pytest.approx(4)


def test_zeroes_come_first() -> None:
    assert quantiles.exponential(0, 1, (10,), 10, 0.4) == 0
    assert quantiles.exponential(0, 1, (10,), 10, 0.75) == pytest.approx(2 * 2**0.5)


def test_nothing_has_no_quantiles() -> None:
    with pytest.raises(ValueError, match="empty"):
        quantiles.explicit(BOUNDS, (0, 0, 0, 0), 0.5)


@pytest.mark.parametrize(("q", "said"), [(0.0, 1), (0.2, 1), (0.21, 2), (0.5, 3), (0.99, 5), (1.0, 5)])
def test_the_exact_quantile_is_one_of_the_values(q: float, said: float) -> None:
    assert quantiles.exact([1, 2, 3, 4, 5], q) == said


def test_what_is_read_is_never_off_by_more_than_a_bucket() -> None:
    draw = random.Random(1)
    for _ in range(200):
        values = sorted(draw.paretovariate(1.5) * 0.01 for _ in range(draw.randrange(1, 400)))
        histogram = ExponentialHistogram()
        for value in values:
            histogram.record(value)
        point = histogram.make_point({}, 0, 0)
        allowed = quantiles.base_of(point.scale) * (1 + 1e-9)
        for q in (0.5, 0.9, 0.99, 0.999):
            read = quantiles.exponential(
                point.scale, point.positive.offset, point.positive.bucket_counts, point.zero_count, q
            )
            assert 1 / allowed <= read / quantiles.exact(values, q) <= allowed
