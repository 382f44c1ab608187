"""Steps that take longer the more tokens there are: that is nobody's cost, and what a hook costs stays."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.neighbours import PACE_LIMIT, undisturbed_below
from benchmarks.transformers_loop import evened


def test_what_a_step_takes_longer_for_its_place_is_taken_out_and_nothing_else() -> None:
    chance, loads, places = np.random.default_rng(1), 40, 54
    hooked = chance.random((loads, places)) < 1 / 3
    grown = 1e6 * (1 + np.linspace(0, 1, places) ** 2)
    times = grown * np.where(hooked, 1.01, 1)
    slowly = np.where(np.arange(loads) < loads / 2, 1, 1.3)[:, None]  # the processor's clock, load by load
    disturbed = chance.random((loads, places)) < 0.1
    probes = 2000.0 * slowly * np.where(disturbed, 1.5, 1)
    wall, cpu, probe = np.moveaxis(evened(np.stack([times, times / 2, probes], axis=2)), 2, 0)
    assert wall[hooked].mean() / wall[~hooked].mean() == pytest.approx(1.01, abs=1e-4)
    assert wall[~hooked].std() / wall.mean() < 1e-3
    assert cpu == pytest.approx(wall / 2)
    assert ((probe > undisturbed_below(probe, PACE_LIMIT)) == disturbed).all()
