"""The same load with and without a fault: what the fault added is what is blamed on it, and without it nothing is."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture
def quota_group() -> Iterator[str]:
    """A control group whose CPU time may be limited from here."""
    group = Path("/sys/fs/cgroup/cpu") / f"otel_infer-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group of version 1 can be made here (cpu controller, root)")
    yield str(group)
    group.rmdir()


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
    struck_is_blamed(cause, faults, faulty, asked, [*asked, OFFENDER] if cause == "interference" else asked)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core only: the load would starve the server too"
)
def test_time_without_a_cpu_is_what_another_process_on_the_same_core_took() -> None:
    spin = {"spin": True}
    struck_is_blamed(
        "starved", spin, {**spin, "struck_prompt": VICTIM.prompt, "hog_ms": 500}, [*EARLY, VICTIM]
    )


def test_throttled_time_is_what_the_quota_took(quota_group: str) -> None:
    spin = {"spin": True, "quota_group": quota_group}
    faulty = {**spin, "struck_prompt": VICTIM.prompt, "throttled_ms": 700}
    struck_is_blamed("throttled", spin, faulty, [*EARLY, VICTIM])


def struck_is_blamed(
    cause: str,
    faults: dict[str, Any],
    faulty: dict[str, Any],
    asked: list[Asked],
    struck: list[Asked] | None = None,
) -> None:
    """Pairs of runs: what the faulty one took longer is blamed on the cause, and nothing in the other."""
    added, blamed, without = [], [], []
    for _ in range(PAIRS):
        plain = victim(faults, asked)
        hit = victim(faulty, struck or asked)
        added.append(hit["duration_ms"] - plain["duration_ms"])
        blamed.append(hit["blame_ms"].get(cause, 0.0))
        without.append(plain["blame_ms"].get(cause, 0.0) / plain["duration_ms"])
        assert sum(hit["blame_ms"].values()) == pytest.approx(hit["duration_ms"])
    assert median(added) > 100
    assert median(b / a for a, b in zip(added, blamed)) == pytest.approx(1, abs=0.2), (added, blamed)
    assert median(without) <= 0.02
