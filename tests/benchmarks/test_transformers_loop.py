"""Steps that take longer the more tokens there are: that is nobody's cost, and what a hook costs stays."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.neighbours import PACE_LIMIT, undisturbed_below
from benchmarks.transformers_loop import Column, evened

LOADS, PLACES = 40, 54


def test_what_a_step_takes_longer_for_its_place_is_taken_out_and_nothing_else() -> None:
    hooked = np.random.default_rng(1).random((LOADS, PLACES)) < 1 / 3
    grown = 1e6 * (1 + np.linspace(0, 1, PLACES) ** 2)
    times = grown * np.where(hooked, 1.01, 1)
    wall, cpu, probe = _evened(times, times / 2, np.full((LOADS, PLACES), 2000.0))
    assert wall[hooked].mean() / wall[~hooked].mean() == pytest.approx(1.01, abs=1e-4)
    assert wall[~hooked].std() / wall.mean() < 1e-3
    assert cpu == pytest.approx(wall / 2)
    assert (probe == 1).all()


def test_a_clock_that_is_slower_for_a_whole_load_disturbs_no_step_but_a_neighbour_does() -> None:
    came = np.random.default_rng(1).random((LOADS, PLACES)) < 0.1
    slower = np.where(np.arange(LOADS) < LOADS / 2, 1, 1.3)[:, None]
    times = np.full((LOADS, PLACES), 1e6)
    *_, probe = _evened(times, times, 2000 * slower * np.where(came, 1.5, 1))
    assert ((probe > undisturbed_below(probe, PACE_LIMIT)) == came).all()


def _evened(wall: Column, cpu: Column, probe: Column) -> Column:
    return np.moveaxis(evened(np.stack([wall, cpu, probe], axis=2)), 2, 0)
