"""What a decode step costs by the size of its batch, from the steps that were seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.assembly.engine.step_cost import MIN_STEPS, fit_cost_model


def seen(
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
def test_a_line_is_found_however_many_sizes_there_were(
    count: int, base: int, each: int, most: int, seed: int
) -> None:
    lengths, sizes = seen(count, base, each, (1, most), seed=seed)
    costs = fit_cost_model(lengths, sizes)
    assert costs is not None
    size = int(np.median(sizes))  # with few steps the ends of the line are less certain
    assert costs.base + costs.per_sequence * size == pytest.approx(base + each * size, rel=0.1)


def test_sizes_that_were_each_seen_once_make_a_line_together() -> None:
    sizes = np.arange(1, 46)
    costs = fit_cost_model(4_000_000 + 1_700_000 * sizes, sizes)
    assert costs is not None
    assert (costs.base, costs.per_sequence) == (pytest.approx(4e6, rel=0.01), pytest.approx(1.7e6, rel=0.01))


def test_some_stalled_steps_change_nothing_and_noise_is_told() -> None:
    lengths, sizes = seen(400, 5e6, 1e5, (1, 30), noise=0.02)
    lengths[::10] *= 20
    costs = fit_cost_model(lengths, sizes)
    assert costs is not None
    assert costs.base + costs.per_sequence * 15 == pytest.approx(6.5e6, rel=0.03)
    assert costs.spread == pytest.approx(0.02 * 6.5e6, rel=0.5)


def test_one_size_says_nothing_of_others_and_a_bigger_batch_is_never_cheaper() -> None:
    alone = fit_cost_model(np.full(50, 7_000_000), np.full(50, 8))
    assert alone is not None and (alone.base, alone.per_sequence) == (7e6, 0)
    sizes = np.repeat([1, 10], 20)
    falling = fit_cost_model(10_000_000 - 500_000 * sizes, sizes)
    assert falling is not None and falling.per_sequence == 0


def test_a_few_steps_are_no_estimate() -> None:
    assert fit_cost_model(np.full(MIN_STEPS - 1, 5), np.full(MIN_STEPS - 1, 1)) is None
