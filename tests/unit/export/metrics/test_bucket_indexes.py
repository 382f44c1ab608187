"""Bucket indexes of exponential histograms, compared with the SDK's, especially at the bucket edges."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.export.metrics.histograms import bucket_of_value, buckets_of_values

lengths = st.floats(0.0, 1000.0)


def edges(scale: int) -> st.SearchStrategy[float]:
    """Values at the edges of buckets and directly beside them."""
    edge = st.integers(-(200 << scale), 200 << scale).map(lambda index: 2.0 ** math.ldexp(index, -scale))
    return edge.flatmap(
        lambda value: st.sampled_from((value, math.nextafter(value, 0), math.nextafter(value, math.inf)))
    )


@pytest.mark.parametrize("scale", range(21))
@settings(max_examples=60)
@given(data=st.data())
def test_index_matches_the_sdk_at_bucket_edges(scale: int, data: st.DataObject) -> None:
    from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping import (
        exponent_mapping,
        logarithm_mapping,
    )

    values = data.draw(st.lists(st.one_of(edges(scale), lengths.filter(bool)), min_size=1, max_size=20))
    mapping = (logarithm_mapping.LogarithmMapping if scale else exponent_mapping.ExponentMapping)(scale)
    expected = [mapping.map_to_index(value) for value in values]
    assert expected == [bucket_of_value(value, scale) for value in values]
    assert expected == buckets_of_values(np.array(values), scale).tolist()


@pytest.mark.parametrize("scale", [1, 3, 5, 8, 12, 20])
def test_array_indexes_match_scalar_indexes_at_edges(scale: int) -> None:
    step = max(1, (60 << scale) // 4000)
    at_edges = 2.0 ** np.ldexp(np.arange(-30 << scale, 30 << scale, step).astype(float), -scale)
    values = np.concatenate([at_edges, np.nextafter(at_edges, 0), np.nextafter(at_edges, np.inf)])
    assert [bucket_of_value(value, scale) for value in values.tolist()] == buckets_of_values(
        values, scale
    ).tolist()


@pytest.mark.parametrize("scale", range(-10, 1))
@given(value=st.floats(5e-324, sys.float_info.max))
def test_index_matches_the_sdk_at_coarse_scales(scale: int, value: float) -> None:
    from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping import exponent_mapping

    expected = exponent_mapping.ExponentMapping(scale).map_to_index(value)
    assert expected == bucket_of_value(value, scale)
    assert [expected] == buckets_of_values(np.array([value]), scale).tolist()
