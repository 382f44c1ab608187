"""Histograms compared with the SDK's, and their own features: whole arrays and selected exemplars."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.metrics.view import (
    ExplicitBucketHistogramAggregation,
    ExponentialBucketHistogramAggregation,
)

from otel_infer import semconv
from otel_infer.export.metrics import histograms
from otel_infer.export.metrics.histograms import ExemplarSource, ExplicitHistogram, ExponentialHistogram

BOUNDS = semconv.TPOT_BOUNDS

lengths = st.floats(0.0, 1000.0)
instants_apart = st.integers(0, 10**12).map(lambda ns: ns / 1e9)
on_a_bound = st.sampled_from((*BOUNDS, *(math.nextafter(bound, math.inf) for bound in BOUNDS)))
powers = st.integers(-30, 10).map(lambda exponent: 2.0**exponent)
measured = st.lists(st.one_of(lengths, instants_apart, on_a_bound, powers), min_size=1, max_size=60)
any_values = st.lists(st.floats(0.0, 1e300), min_size=1, max_size=40)


def sdk_point(batches: list[list[float]], aggregation: Any) -> Any:
    """Returns the SDK's cumulative point after recording the batches, with a collection after each."""
    reader = InMemoryMetricReader(preferred_aggregation={HistogramInstrument: aggregation})
    instrument = MeterProvider(metric_readers=[reader]).get_meter("test").create_histogram("h")
    for batch in batches:
        for value in batch:
            instrument.record(value)
        data = reader.get_metrics_data()
    return data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0]


def our_point(histogram: Any, batches: list[list[float]], whole: bool) -> Any:
    for batch in batches:
        if whole:
            histogram.record_many(np.sort(batch))
        else:
            for value in batch:
                histogram.record(value)
    return histogram.make_point({}, 1, 2)


def assert_same_statistics(expected: Any, actual: Any) -> None:
    assert (expected.count, expected.min, expected.max) == (actual.count, actual.min, actual.max)
    assert math.isclose(expected.sum, actual.sum, rel_tol=1e-12)


def assert_same_buckets(expected: Any, actual: Any) -> None:
    """Ignores zeroes at the end of the SDK's counts, because its arrays grow in powers of two."""
    counts = list(expected.positive.bucket_counts)
    while counts and counts[-1] == 0:
        counts.pop()
    assert expected.zero_count == actual.zero_count
    assert counts == list(actual.positive.bucket_counts)
    assert list(actual.negative.bucket_counts) == []
    if counts:
        assert (expected.scale, expected.positive.offset) == (actual.scale, actual.positive.offset)


@pytest.mark.parametrize("whole", [False, True])
@given(values=measured)
def test_explicit_buckets_match_the_sdk(whole: bool, values: list[float]) -> None:
    expected = sdk_point([values], ExplicitBucketHistogramAggregation(BOUNDS))
    actual = our_point(ExplicitHistogram(BOUNDS), [values], whole)
    assert_same_statistics(expected, actual)
    assert list(expected.bucket_counts) == list(actual.bucket_counts)
    assert list(expected.explicit_bounds) == list(actual.explicit_bounds)


@pytest.mark.parametrize("whole", [False, True])
@given(values=st.one_of(measured, any_values))
@example(values=[0.0])
@example(values=[0.0, 5e-324, sys.float_info.min, 1e300])
@example(values=[1.0, 2.0, 4.0])
def test_exponential_buckets_match_the_sdk(whole: bool, values: list[float]) -> None:
    expected = sdk_point([values], ExponentialBucketHistogramAggregation())
    actual = our_point(ExponentialHistogram(), [values], whole)
    assert_same_statistics(expected, actual)
    assert_same_buckets(expected, actual)


@given(batches=st.lists(measured.filter(any), min_size=2, max_size=4))
def test_exponential_buckets_match_the_sdk_over_collections(batches: list[list[float]]) -> None:
    # A collection with only zeroes makes the SDK drop to scale 0 permanently; ours does not.
    expected = sdk_point(batches, ExponentialBucketHistogramAggregation())
    actual = our_point(ExponentialHistogram(), batches, whole=True)
    assert_same_statistics(expected, actual)
    assert_same_buckets(expected, actual)


@pytest.mark.parametrize("histogram", [ExplicitHistogram(BOUNDS), ExponentialHistogram()])
def test_negative_and_nonfinite_values_are_ignored(histogram: histograms.Histogram) -> None:
    for value in (-0.1, math.nan, math.inf):
        histogram.record(value)
    histogram.record_many(np.array([-1.0, math.inf, math.nan]))
    histogram.record_many(np.array([]))
    assert 0 == histogram.count
    histogram.record_many(np.array([-1.0, 0.5, math.nan]))
    assert (1, 0.5, 0.5, 0.5) == (histogram.count, histogram.sum, histogram.min, histogram.max)


def test_exponential_histogram_has_at_most_160_buckets() -> None:
    histogram = ExponentialHistogram()
    histogram.record_many(np.linspace(0.0079, 0.0081, 1000))
    fine = histogram.make_point({}, 1, 2)
    histogram.record_many(np.geomspace(1e-6, 100, 1000))
    coarse = histogram.make_point({}, 1, 2)
    assert len(fine.positive.bucket_counts) <= 160
    assert len(coarse.positive.bucket_counts) <= 160
    assert fine.scale > coarse.scale >= 2
    assert 2000 == sum(coarse.positive.bucket_counts)


@pytest.mark.parametrize("whole", [False, True])
def test_bucket_exemplar_is_its_latest_sourced_value(whole: bool) -> None:
    histogram = ExplicitHistogram((1.0, 2.0))
    for value, source in (
        (0.5, ExemplarSource(1, 2, 10)),
        (0.6, ExemplarSource(3, 4, 20)),
        (0.7, None),
        (5.0, ExemplarSource(5, 6, 30)),
    ):
        if whole:
            histogram.record_many(np.array([value]), [source].__getitem__)
        else:
            histogram.record(value, source)
    exemplars = histogram.make_point({}, 1, 2).exemplars
    expected = [(0.6, 3, 4, 20), (5.0, 5, 6, 30)]
    assert expected == [(e.value, e.trace_id, e.span_id, e.time_unix_nano) for e in exemplars]


@pytest.mark.parametrize("histogram", [ExplicitHistogram((1.0, 2.0, 4.0)), ExponentialHistogram()])
def test_array_exemplar_is_the_largest_per_bucket(histogram: histograms.Histogram) -> None:
    histogram.record(0.0)
    histogram.record(100.0)  # so that the scale is coarse enough for two values in one bucket
    histogram.record(1e-9)
    sources = [ExemplarSource(1, 2, number) for number in range(5)]
    histogram.record_many(np.array([0.0, 1.5, 3.01, 3.02, 3.03]), sources.__getitem__)
    values = [exemplar.value for exemplar in histogram.make_point({}, 1, 2).exemplars]
    assert values == [0.0, 1.5, 3.03]  # ordered by time, each with its own source
    assert all(isinstance(value, float) for value in values)


def test_merged_buckets_keep_the_later_exemplar() -> None:
    histogram = ExponentialHistogram()
    histogram.record(8.02, ExemplarSource(2, 2, 20))
    histogram.record(8.01, ExemplarSource(1, 1, 10))
    assert 2 == len(histogram.make_point({}, 1, 2).exemplars)
    histogram.record(1e-9)
    assert [8.02] == [exemplar.value for exemplar in histogram.make_point({}, 1, 2).exemplars]


def test_zero_bucket_keeps_its_exemplar_at_every_scale() -> None:
    histogram = ExponentialHistogram()
    for value, at in ((0.0, 10), (1.0, 20), (100.0, 30), (0.0, 40)):
        histogram.record(value, ExemplarSource(1, 1, at))
    point = histogram.make_point({}, 1, 2)
    assert 2 == point.zero_count
    expected = [(1.0, 20), (100.0, 30), (0.0, 40)]
    assert expected == [(exemplar.value, exemplar.time_unix_nano) for exemplar in point.exemplars]


def test_exemplars_are_ordered_by_time() -> None:
    histogram = ExponentialHistogram()
    for value, at in ((1.0, 30), (2.0, 10), (3.0, 20)):
        histogram.record(value, ExemplarSource(1, 1, at))
    assert [10, 20, 30] == [exemplar.time_unix_nano for exemplar in histogram.make_point({}, 1, 2).exemplars]


@pytest.mark.parametrize("histogram", [ExplicitHistogram((1.0,)), ExponentialHistogram()])
def test_sdk_without_exemplars_gets_points_without_them(
    histogram: histograms.Histogram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histograms, "Exemplar", None)
    histogram.record(0.5, ExemplarSource(1, 2, 3))
    assert [] == histogram.make_point({}, 1, 2).exemplars


def test_excess_attribute_sets_share_an_overflow_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "MAX_SERIES", 2)
    series = histograms.HistogramSeries(semconv.STEP_BATCH_SIZE, exponential=False)
    for pid in (1, 2, 3, 4, 1):
        series.get_or_create(("decode", None, pid)).record(8)
    points = series.collect_data(AggregationTemporality.CUMULATIVE, 1, 2).data_points
    expected: list[tuple[dict[str, Any], int]] = [
        ({"infer.step.kind": "decode", "process.pid": 1}, 2),
        ({"infer.step.kind": "decode", "process.pid": 2}, 1),
        ({"otel.metric.overflow": True}, 2),
    ]
    assert expected == [(point.attributes, point.count) for point in points]
