"""The same load with and without a fault: the added latency is attributed to the fault, and only with the fault."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from benchmarks import verdict
from benchmarks.complaints import TimedRequest, explain_faults

TARGET = TimedRequest(1.2, 77, 80)
EARLY = [TimedRequest(0.1 * number, 20, 8) for number in range(10)]
"""The first requests calibrate the cost of the engine's steps."""
INTERFERER = TimedRequest(1.6, 3000, 2)
BLOCKER = TimedRequest(1.25, 33, 2)
EXTRA_REQUESTS = {"interference": [INTERFERER], "event_loop": [BLOCKER]}
"""Extra requests of the faulty run, by cause."""
MIN_PAIRS, MAX_PAIRS = 5, 18
"""A shared machine needs more pairs."""
MIN_RATIO, MAX_RATIO = 1 / 1.2, 1 / 0.8
"""Added latency over attributed latency, for an attribution within 20 %."""
MAX_UNFAULTED_SHARE = 0.02
"""Largest share of a request that may be attributed to an absent cause."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def quota_group() -> Iterator[str]:
    """A control group with a CPU quota that the test can set."""
    group = Path("/sys/fs/cgroup/cpu") / f"otel_infer-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("cannot create a control group of version 1 (cpu controller, root)")
    yield str(group)
    group.rmdir()


def explain_target(faults: dict[str, Any], requests: list[TimedRequest]) -> dict[str, Any]:
    """Returns what explain reports about the target request."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    report = explain_faults(faults, requests)
    (found,) = [request for request in report["worst"] if request["input_tokens"] == TARGET.prompt]
    return dict(found)


@pytest.mark.parametrize(
    ("cause", "faults", "faulty"),
    [
        ("interference", {"prompt_ms": 0.15}, {"prompt_ms": 0.15}),
        ("gc", {}, {"gc_every_ms": 250, "gc_objects": 2_000_000}),
        (
            "preemption",
            {},
            {"preempted_prompt": TARGET.prompt, "preempted_after": 30, "preempted_ms": 400},
        ),
        (
            "event_loop",
            {"lookup_ms": 100},
            {"lookup_ms": 100, "blocking_prompt": BLOCKER.prompt, "blocking_ms": 400},
        ),
    ],
)
def test_added_latency_is_attributed_to_the_fault(
    cause: str, faults: dict[str, Any], faulty: dict[str, Any]
) -> None:
    assert_added_is_attributed(cause, faults, faulty)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core only: the load would also starve the server"
)
def test_starved_time_matches_a_competing_process() -> None:
    spin = {"spin": True}
    assert_added_is_attributed("starved", spin, {**spin, "struck_prompt": TARGET.prompt, "hog_ms": 500})


def test_throttled_time_matches_the_quota(quota_group: str) -> None:
    spin = {"spin": True, "quota_group": quota_group}
    faulty = {**spin, "struck_prompt": TARGET.prompt, "throttled_ms": 700}
    assert_added_is_attributed("throttled", spin, faulty)


def assert_added_is_attributed(cause: str, faults: dict[str, Any], faulty: dict[str, Any]) -> None:
    """Runs pairs: the added latency of the faulty run is attributed to the cause, and none in the other run.

    Runs as many pairs as the machine needs, and skips after `MAX_PAIRS` without a result.
    """
    requests = [*EARLY, TARGET]
    added, attributed, without = [], [], []
    for number in range(1, MAX_PAIRS + 1):
        plain = explain_target(faults, requests)
        with_fault = explain_target(faulty, [*requests, *EXTRA_REQUESTS.get(cause, ())])
        assert sum(with_fault["causes_ms"].values()) == pytest.approx(with_fault["duration_ms"])
        added.append(with_fault["duration_ms"] - plain["duration_ms"])
        attributed.append(with_fault["causes_ms"].get(cause, 0.0))
        without.append(plain["causes_ms"].get(cause, 0.0) / plain["duration_ms"])
        if number < MIN_PAIRS:
            continue
        assert median(attributed) > 60, attributed
        share, unfaulted = _added_to_attributed(added, attributed), verdict.estimate_median(without)
        if MIN_RATIO <= share.value <= MAX_RATIO and unfaulted.value <= MAX_UNFAULTED_SHARE:
            return
    assert share.low <= MAX_RATIO and share.high >= MIN_RATIO, (added, attributed)
    assert unfaulted.low <= MAX_UNFAULTED_SHARE, without
    pytest.skip(f"other load on this machine hides the added latency: {[round(ms) for ms in added]} ms")


def _added_to_attributed(added: list[float], attributed: list[float]) -> verdict.Figure:
    """Returns added over attributed latency; the divisor is at least 1 ms, so noise cannot make it infinite."""
    added_ms, attributed_ms = np.array(added), np.array(attributed)
    return verdict.bootstrap_figure(
        len(added_ms),
        lambda rows: float(np.median(added_ms[rows]) / max(np.median(attributed_ms[rows]), 1.0)),
    )


def test_blocked_event_loop_is_named_for_stuttering_streams() -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    streams = [TimedRequest(0.2 + 0.02 * number, 20, 150) for number in range(14)]
    blockers = [BLOCKER._replace(at=0.6 + 0.4 * number) for number in range(4)]
    report = explain_faults({"blocking_prompt": BLOCKER.prompt, "blocking_ms": 200}, [*streams, *blockers])
    (found,) = [finding for finding in report["findings"] if finding["cause"] == "event_loop"]
    assert found["symptom"] == "stutter"
    assert "asyncio.to_thread" in found["change"]
