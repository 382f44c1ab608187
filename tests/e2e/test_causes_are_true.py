"""The same load with and without a fault: what the fault added is what is blamed on it, and without it nothing is."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from benchmarks.complaints import Asked, explained

VICTIM = Asked(1.2, 77, 80)
EARLY = [Asked(0.1 * number, 20, 8) for number in range(10)]
"""Whoever comes first shows what the engine's steps cost."""
OFFENDER = Asked(1.6, 3000, 2)
PAIRS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def victim(faults: dict[str, Any], asked: list[Asked]) -> dict[str, Any]:
    """What is said of the one request that is watched."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    said = explained(faults, asked)
    (found,) = [one for one in said["worst"] if one["input_tokens"] == VICTIM.prompt]
    return dict(found)


@pytest.mark.parametrize(
    ("cause", "faults", "faulty"),
    [
        ("interference", {"prompt_ms": 0.15}, {"prompt_ms": 0.15}),
        ("gc", {}, {"gc_every_ms": 350, "gc_objects": 1_200_000}),
        (
            "preemption",
            {},
            {"preempted_prompt": VICTIM.prompt, "preempted_after": 30, "preempted_ms": 400},
        ),
    ],
)
def test_what_a_fault_added_is_what_is_blamed_on_it(
    cause: str, faults: dict[str, Any], faulty: dict[str, Any]
) -> None:
    asked = [*EARLY, VICTIM]
    added, blamed, without = [], [], []
    for _ in range(PAIRS):
        plain = victim(faults, asked)
        hit = victim(faulty, [*asked, OFFENDER] if cause == "interference" else asked)
        added.append(hit["duration_ms"] - plain["duration_ms"])
        blamed.append(hit["blame_ms"].get(cause, 0.0))
        without.append(plain["blame_ms"].get(cause, 0.0) / plain["duration_ms"])
        assert sum(hit["blame_ms"].values()) == pytest.approx(hit["duration_ms"])
    assert median(added) > 100
    assert median(b / a for a, b in zip(added, blamed)) == pytest.approx(1, abs=0.2), (added, blamed)
    assert median(without) <= 0.02
