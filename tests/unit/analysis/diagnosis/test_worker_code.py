"""Waits in a queue while a worker runs its own code are a complaint about that code, not about the queue."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.analysis.diagnosis.worker_code import find_waits_for_code
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import RequestRecord
from tests.support.served_load import MS
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record


def serve(draw: random.Random, code: str, share: float = 0.2, code_ms: float = 600.0) -> list[RequestRecord]:
    """Returns the requests of one worker, whose code takes long for a share of them, at this cause."""
    at = free_at = 0.0
    records = []
    for _ in range(80):
        at += draw.expovariate(1 / 200)
        taken_at = max(at + 1.05, free_at)
        causes = {"ingress": 1.0, "work_queue": taken_at - at - 1}
        own = {"application": 1.0, "decode": draw.uniform(30, 40), "egress": 1.0}
        if draw.random() < share:
            own[code] += code_ms
        free_at = taken_at + sum(own.values())
        records.append(make_record(at, {**causes, **own}, tokens=0))
    return records


@pytest.mark.parametrize(("code", "verdict"), [("application", "pre_engine"), ("egress", "late_end")])
def test_requests_behind_slow_code_of_a_worker_blame_that_code(code: str, verdict: str) -> None:
    for seed in range(10):
        diagnosis = diagnose_requests(serve(random.Random(seed), code))
        assert (diagnosis.verdict, diagnosis.findings[0].cause) == (verdict, code), seed
        assert any(
            "in the queue while a worker runs this code" in line for line in diagnosis.findings[0].evidence
        )


@pytest.mark.parametrize(("code", "verdict"), [("application", "pre_engine"), ("egress", "late_end")])
def test_code_of_a_few_requests_is_named_where_others_wait_for_it(code: str, verdict: str) -> None:
    """The slowest requests are those that wait, and have none of it."""
    for seed in range(10):
        records = serve(random.Random(seed), code, share=0.02, code_ms=4000.0)
        slow = [
            record for record in records if record.breakdown and record.breakdown.causes[code] > 1000 * MS
        ]
        if not slow:
            continue
        diagnosis = diagnose_requests(records)
        assert (diagnosis.verdict, diagnosis.findings[0].cause) == (verdict, code), seed
        assert any(
            "in the queue while a worker runs this code" in line for line in diagnosis.findings[0].evidence
        )


def test_requests_behind_slow_calls_of_the_model_wait_in_a_queue() -> None:
    for seed in range(10):
        diagnosis = diagnose_requests(serve(random.Random(seed), "decode"))
        assert diagnosis.verdict in ("queueing", "peak", "head_of_line_blocking"), seed


def stop_loop(record: RequestRecord, begin_ms: float, end_ms: float) -> RequestRecord:
    record.loop_pauses = (*record.loop_pauses, Pause(int(begin_ms * MS), int(end_ms * MS), "event_loop"))
    return record


def test_each_ns_of_a_wait_has_one_reason() -> None:
    """A worker takes a request at 10 ms, and calls a model from 110 to 150 ms. Its answer is sent at 200 ms."""
    first: dict[str, Any] = {"ingress": 10.0, "application": 100.0, "decode": 40.0, "egress": 50.0}
    taken = make_record(0, first, tokens=0)
    taken.stages.insert(1, taken.stages[0]._replace(name="queue wait"))
    waiting = make_record(20, {"work_queue": 180.0, "application": 1.0, "decode": 40.0}, tokens=0)

    waits = find_waits_for_code([taken, waiting])
    assert waits.before.tolist() == [0, 90 * MS]
    assert waits.after.tolist() == [0, 50 * MS]

    waits = find_waits_for_code([stop_loop(taken, 50, 100), waiting])
    assert waits.before.tolist() == [0, 40 * MS], "meanwhile the event loop stands still"


def test_requests_without_a_queue_wait_for_no_worker() -> None:
    waits = find_waits_for_code([make_record(at, {"application": 300.0, "decode": 20.0}) for at in range(3)])
    assert np.concatenate(waits).tolist() == [0] * 6
