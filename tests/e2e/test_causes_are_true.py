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
BLOCKER = Asked(1.25, 33, 2)
BESIDE = {"interference": [OFFENDER], "event_loop": [BLOCKER]}
"""Who comes as well where the cause is to be there."""
PAIRS, MOST_PAIRS = 18, 9
"""A machine that others use as well needs more of them."""

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
        ("gc", {}, {"gc_every_ms": 250, "gc_objects": 2_000_000}),
        (
            "preemption",
            {},
            {"preempted_prompt": VICTIM.prompt, "preempted_after": 30, "preempted_ms": 400},
        ),
        (
            "event_loop",
            {"lookup_ms": 100},
            {"lookup_ms": 100, "blocking_prompt": BLOCKER.prompt, "blocking_ms": 400},
        ),
    ],
)
def test_what_a_fault_added_is_what_is_blamed_on_it(
    cause: str, faults: dict[str, Any], faulty: dict[str, Any]
) -> None:
    added_is_blamed(cause, faults, faulty)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core only: the load would starve the server too"
)
def test_time_without_a_cpu_is_what_another_process_on_the_same_core_took() -> None:
    spin = {"spin": True}
    added_is_blamed("starved", spin, {**spin, "struck_prompt": VICTIM.prompt, "hog_ms": 500})


def test_throttled_time_is_what_the_quota_took(quota_group: str) -> None:
    spin = {"spin": True, "quota_group": quota_group}
    faulty = {**spin, "struck_prompt": VICTIM.prompt, "throttled_ms": 700}
    added_is_blamed("throttled", spin, faulty)


def added_is_blamed(cause: str, faults: dict[str, Any], faulty: dict[str, Any]) -> None:
    """Pairs of runs: what the faulty one took longer is blamed on the cause, and nothing in the other."""
    asked = [*EARLY, VICTIM]
    added, blamed, without = [], [], []
    for number in range(MOST_PAIRS):
        plain = victim(faults, asked)
        hit = victim(faulty, [*asked, *BESIDE.get(cause, ())])
        added.append(hit["duration_ms"] - plain["duration_ms"])
        blamed.append(hit["blame_ms"].get(cause, 0.0))
        without.append(plain["blame_ms"].get(cause, 0.0) / plain["duration_ms"])
        assert sum(hit["blame_ms"].values()) == pytest.approx(hit["duration_ms"])
        if number + 1 >= PAIRS and _agree(added, blamed) and median(without) <= 0.02:
            break
    assert median(added) > 60  # or else there is nothing to compare
    assert _agree(added, blamed), (added, blamed)
    assert median(without) <= 0.02, without


def _agree(added: list[float], blamed: list[float]) -> bool:
    ratio: float = median(b / a for a, b in zip(added, blamed))
    return ratio == pytest.approx(1, abs=0.2)


def test_streams_that_a_blocked_event_loop_does_not_send_are_told_so() -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    streams = [Asked(0.2 + 0.02 * number, 20, 150) for number in range(14)]
    blockers = [BLOCKER._replace(at=0.6 + 0.4 * number) for number in range(4)]
    said = explained({"blocking_prompt": BLOCKER.prompt, "blocking_ms": 200}, [*streams, *blockers])
    (found,) = [finding for finding in said["findings"] if finding["cause"] == "event_loop"]
    assert found["complaint"] == "stutter"
    assert "asyncio.to_thread" in found["change"]
