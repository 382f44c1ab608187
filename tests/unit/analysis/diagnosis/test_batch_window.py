"""Requests that wait until their batch is complete are told from requests that wait for a busy worker."""

from __future__ import annotations

import random

import pytest

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.assembly.records.request import RequestRecord
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record


def serve(draw: random.Random, wait: str, wait_ms: float, count: int = 60) -> list[RequestRecord]:
    """Returns requests that waited up to so long, before a call of the model."""
    at, records = 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / 200)
        causes = {
            "ingress": 2,
            wait: draw.uniform(0.6, 1) * wait_ms,
            "decode": draw.uniform(40, 70),
            "egress": 1,
        }
        records.append(make_record(at, causes))
    return records


@pytest.mark.parametrize(
    ("wait", "wait_ms", "verdicts"),
    [
        ("batch_wait", 400, ("batching",)),
        ("work_queue", 400, ("queueing", "peak")),
        ("batch_wait", 10, ("healthy",)),
    ],
)
def test_a_long_window_is_no_queue(wait: str, wait_ms: float, verdicts: tuple[str, ...]) -> None:
    for seed in range(10):
        diagnosis = diagnose_requests(serve(random.Random(seed), wait, wait_ms))
        assert diagnosis.verdict in verdicts, seed
        assert "healthy" in verdicts or diagnosis.findings[0].cause == wait
