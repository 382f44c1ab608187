"""Detection of the slowest requests of each size class."""

from __future__ import annotations

import random

import numpy as np
from ddsketch import DDSketch

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.sampling import slow_detector
from otel_infer.export.sampling.slow_detector import ACCURACY, MAX_CLASSES, MIN_REQUESTS, SlowRequestDetector


def request(duration: int, ttft: int = 0, tokens: int = 100, prompt: int = 100) -> RequestRecord:
    names = dict.fromkeys(("name", "operation", "provider", "model", "engine"), "")
    ids = dict.fromkeys(("trace_id", "span_id", "parent_span_id", "server_span_id"), b"")
    return RequestRecord(
        **ids, **names, sampled=True, remote_parent=False, arrived_at=0, ended_at=duration, wall_offset=0,
        first_token_at=ttft, output_tokens=tokens, input_tokens=prompt,
    )  # fmt: skip


def test_slow_share_is_close_to_the_configured_one() -> None:
    draw = random.Random(1)
    slow = SlowRequestDetector(0.05)
    found = [slow.is_slow(request(int(draw.lognormvariate(0, 1) * 1e9))) for _ in range(5000)]
    assert 0.03 < sum(found) / len(found) < 0.07


def test_long_output_alone_is_not_slow() -> None:
    slow = SlowRequestDetector(0.05)
    for _ in range(200):
        slow.is_slow(request(1000, tokens=100))
        slow.is_slow(request(50_000, tokens=5000))
    assert not slow.is_slow(request(50_000, tokens=5000))
    assert slow.is_slow(request(50_000, tokens=100))


def test_long_time_to_first_token_is_slow() -> None:
    slow = SlowRequestDetector(0.05)
    for _ in range(200):
        slow.is_slow(request(1000, ttft=10))
    assert not slow.is_slow(request(1000, ttft=10))
    assert slow.is_slow(request(1000, ttft=500))


def test_first_requests_of_a_size_are_not_slow() -> None:
    slow = SlowRequestDetector(0.5)
    assert not any(slow.is_slow(request(1000 + i)) for i in range(MIN_REQUESTS))


def test_threshold_follows_the_load() -> None:
    slow = SlowRequestDetector(0.05)
    for _ in range(slow_detector.MAX_SKETCH_REQUESTS):
        slow.is_slow(request(1000))
    found = [slow.is_slow(request(3000)) for _ in range(1000)]
    assert found[0] and not any(found[-100:])


def test_size_classes_are_limited() -> None:
    slow = SlowRequestDetector(0.05)
    for prompt in range(20):
        for tokens in range(20):
            slow.is_slow(request(1000, tokens=1 << tokens, prompt=1 << prompt))
    assert len(slow._size_classes) == MAX_CLASSES


def test_share_zero_finds_no_slow_request() -> None:
    slow = SlowRequestDetector(0)
    assert not any(slow.is_slow(request(i**3)) for i in range(1, 200))


def test_sketch_quantiles_are_within_their_accuracy() -> None:
    """The durations are Pareto distributed, without an upper end."""
    durations = 3 * (1 + np.random.default_rng(1).pareto(2.0, slow_detector.MAX_SKETCH_REQUESTS))
    sketch = DDSketch(ACCURACY)
    for duration in durations.tolist():
        sketch.add(duration)
    for quantile in (0.5, 0.95, 0.99, 0.999):
        exact = float(np.quantile(durations, quantile, method="lower"))
        estimate = sketch.get_quantile_value(quantile)
        assert estimate is not None
        assert abs(estimate / exact - 1) <= ACCURACY
