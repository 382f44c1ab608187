"""The cost model: the duration of a decode step by batch size, fitted to observed steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.assembly.engine.step_cost import MIN_STEPS, fit_cost_model


def sampled_steps(
    count: int, base: float, each: float, sizes: tuple[int, int], noise: float = 0.0, seed: int = 1
) -> tuple:
    draw = np.random.default_rng(seed)
    size = draw.integers(sizes[0], sizes[1] + 1, count)
    length = (base + each * size) * (1 + noise * draw.standard_normal(count))
    return length.astype(np.int64), size


@settings(max_examples=60)
@given(
    st.integers(40, 1024), st.integers(1_000_000, 20_000_000), st.integers(0, 2_000_000), st.integers(2, 200),
    st.integers(0, 99),
)  # fmt: skip
def test_line_is_fitted_for_any_number_of_sizes(
    count: int, base: int, each: int, most: int, seed: int
) -> None:
    lengths, sizes = sampled_steps(count, base, each, (1, most), seed=seed)
    model = fit_cost_model(lengths, sizes)
    assert model is not None
    size = int(np.median(sizes))  # with few steps the ends of the line are less certain
    assert model.base + model.per_sequence * size == pytest.approx(base + each * size, rel=0.1)


def test_sizes_seen_once_fit_a_line() -> None:
    sizes = np.arange(1, 46)
    model = fit_cost_model(4_000_000 + 1_700_000 * sizes, sizes)
    assert model is not None
    assert (model.base, model.per_sequence) == (pytest.approx(4e6, rel=0.01), pytest.approx(1.7e6, rel=0.01))


def test_stalled_steps_are_ignored_and_noise_is_measured() -> None:
    lengths, sizes = sampled_steps(400, 5e6, 1e5, (1, 30), noise=0.02)
    lengths[::10] *= 20
    model = fit_cost_model(lengths, sizes)
    assert model is not None
    assert model.base + model.per_sequence * 15 == pytest.approx(6.5e6, rel=0.03)
    assert model.spread == pytest.approx(0.02 * 6.5e6, rel=0.5)


def test_slope_is_zero_or_more() -> None:
    alone = fit_cost_model(np.full(50, 7_000_000), np.full(50, 8))
    assert alone is not None and (alone.base, alone.per_sequence) == (7e6, 0)
    sizes = np.repeat([1, 10], 20)
    falling = fit_cost_model(10_000_000 - 500_000 * sizes, sizes)
    assert falling is not None and falling.per_sequence == 0


def test_few_steps_give_no_estimate() -> None:
    assert fit_cost_model(np.full(MIN_STEPS - 1, 5), np.full(MIN_STEPS - 1, 1)) is None
