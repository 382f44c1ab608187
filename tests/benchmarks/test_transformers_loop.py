"""Step times grow with the number of tokens. This growth is removed, and the cost of hooks remains."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.neighbours import PACE_LIMIT, compute_limit
from benchmarks.transformers_loop import Column, remove_growth

LOADS, PLACES = 40, 54


def test_only_growth_with_the_position_is_removed() -> None:
    hooked = np.random.default_rng(1).random((LOADS, PLACES)) < 1 / 3
    grown = 1e6 * (1 + np.linspace(0, 1, PLACES) ** 2)
    times = grown * np.where(hooked, 1.01, 1)
    wall, cpu, probe = _even_out(times, times / 2, np.full((LOADS, PLACES), 2000.0))
    assert wall[hooked].mean() / wall[~hooked].mean() == pytest.approx(1.01, abs=1e-4)
    assert wall[~hooked].std() / wall.mean() < 1e-3
    assert cpu == pytest.approx(wall / 2)
    assert (probe == 1).all()


def test_neighbours_disturb_steps_but_slower_clocks_do_not() -> None:
    disturbed = np.random.default_rng(1).random((LOADS, PLACES)) < 0.1
    slower = np.where(np.arange(LOADS) < LOADS / 2, 1, 1.3)[:, None]
    times = np.full((LOADS, PLACES), 1e6)
    *_, probe = _even_out(times, times, 2000 * slower * np.where(disturbed, 1.5, 1))
    assert ((probe > compute_limit(probe, PACE_LIMIT)) == disturbed).all()


def _even_out(wall: Column, cpu: Column, probe: Column) -> Column:
    return np.moveaxis(remove_growth(np.stack([wall, cpu, probe], axis=2)), 2, 0)
