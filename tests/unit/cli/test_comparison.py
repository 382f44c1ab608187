"""Two tapes side by side: what is drawn at once changes nothing but the memory that it takes."""

from __future__ import annotations

import numpy as np
import pytest

from otel_infer.cli import comparison


def test_samples_are_drawn_some_at_a_time_and_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).lognormal(size=500)
    drawn = []
    for most in (comparison.MOST_AT_ONCE, 700, 100):  # the last less than one sample
        monkeypatch.setattr(comparison, "MOST_AT_ONCE", most)
        drawn.append(comparison._drawn(values, np.random.default_rng(0)))
        assert drawn[-1].shape == (comparison.DRAWS,)
    assert np.ptp([np.median(one) for one in drawn]) < 0.05 * np.median(drawn[0])
