"""The verdicts on the sidecar at ordinary load."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sidecar_load import LOADS, LoadPart, OrdinaryLoad, make_lines
from benchmarks.verdict import FAIL, INCONCLUSIVE, PASS
from otel_infer import semconv

LOAD = OrdinaryLoad("load", 1.0, "all", 10, 50, 30)


def make_counts(requests: int) -> dict[str, Any]:
    return {"steps": 290, "metrics": {semconv.REQUEST_DURATION.name: {"a": requests - 1, "b": 1}}}


@pytest.mark.parametrize(
    ("shares", "counted", "verdict"),
    [
        ([0.8, 0.9, 0.9], 100, PASS),
        ([1.2, 1.3, 1.1], 100, FAIL),
        ([0.9, 0.9, 1.1], 100, INCONCLUSIVE),
        ([0.8, 0.9, 0.9], 99, INCONCLUSIVE),
    ],
    ids=["below", "above", "bounds around the gate", "a request is missing"],
)
def test_a_load_passes_by_its_upper_bound(shares: list[float], counted: int, verdict: str) -> None:
    parts = [LoadPart(share, wakes=10.0) for share in shares]
    (line,) = make_lines(LOAD, parts, 100, make_counts(counted))
    assert (line.verdict, line.gate) == (verdict, "≤ 1 % of a core")
    assert line.note == "10.0 wakes/s, 290 step spans"


def test_the_claims_state_the_loads() -> None:
    idle, steps, short, batching = LOADS
    assert not idle.requests_per_s
    assert steps.requests_per_s * steps.tokens == 300
    assert not short.steps_per_s
    assert batching.requests_per_s * batching.tokens / batching.steps_per_s == 30, "members of a step"
