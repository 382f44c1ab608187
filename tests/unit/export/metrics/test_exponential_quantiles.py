"""Quantiles of exponential histograms, read as Prometheus' `histogram_quantile` does, against exact ones."""

from __future__ import annotations

import math
import random
from itertools import accumulate

from opentelemetry.sdk.metrics.export import ExponentialHistogramDataPoint

from otel_infer.export.metrics.histograms import ExponentialHistogram


def estimate_quantile(point: ExponentialHistogramDataPoint, q: float) -> float:
    """Returns the quantile by logarithmic interpolation inside its bucket."""
    counts = [point.zero_count, *point.positive.bucket_counts]
    rank = q * sum(counts)
    bucket, upto = next(
        (bucket, upto) for bucket, upto in enumerate(accumulate(counts)) if upto >= rank and counts[bucket]
    )
    if bucket == 0:
        return 0.0
    position = (rank - upto + counts[bucket]) / counts[bucket]
    return bucket_ratio(point) ** (point.positive.offset + bucket - 1 + position)


def bucket_ratio(point: ExponentialHistogramDataPoint) -> float:
    """Returns the upper bound of a bucket over its lower bound."""
    return float(2.0 ** (2.0**-point.scale))


def test_a_quantile_errs_by_at_most_one_bucket() -> None:
    rng = random.Random(1)
    for _ in range(200):
        values = sorted(rng.paretovariate(1.5) * 0.01 for _ in range(rng.randrange(1, 400)))
        histogram = ExponentialHistogram()
        for value in values:
            histogram.record(value)
        point = histogram.make_point({}, 0, 0)
        allowed = bucket_ratio(point) * (1 + 1e-9)
        for q in (0.5, 0.9, 0.99, 0.999):
            exact = values[max(math.ceil(q * len(values)) - 1, 0)]
            assert 1 / allowed <= estimate_quantile(point, q) / exact <= allowed
