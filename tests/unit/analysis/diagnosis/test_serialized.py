"""Requests that wait for each other's model calls, as with a lock, are told from requests whose code is slow."""

from __future__ import annotations

import random

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.analysis.diagnosis.serialized import find_serialized_waits
from otel_infer.assembly.records.request import RequestRecord
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record

CALL_MS = 100.0


def serve_one_at_a_time(
    draw: random.Random, count: int = 60, every: float = 130.0, call_ms: float = CALL_MS
) -> list[RequestRecord]:
    """Returns requests of which one generates at a time; the others' code waits after tokenization."""
    at = free_at = 0.0
    records = []
    for _ in range(count):
        at += draw.expovariate(1 / every)
        ready = at + 3
        begin = max(ready, free_at + 0.5)
        free_at = begin + call_ms
        causes = {
            "ingress": 2,
            "tokenize": 1,
            "application": begin - ready,
            "prefill": 10,
            "decode": call_ms - 10,
        }
        records.append(make_record(at, {cause: ms for cause, ms in causes.items() if ms}))
    return records


def prepare_slowly(draw: random.Random, count: int = 60) -> list[RequestRecord]:
    """Returns requests whose code takes long after tokenization, at its own pace."""
    at, records = 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / 400)
        records.append(
            make_record(
                at,
                {
                    "ingress": 2,
                    "tokenize": 1,
                    "application": draw.uniform(50, 300),
                    "prefill": 10,
                    "decode": 90,
                },
            )
        )
    return records


def test_lock_is_found_in_the_order_of_calls() -> None:
    for seed in range(10):
        records = serve_one_at_a_time(random.Random(seed))
        diagnosis = diagnose_requests(records)
        assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("queueing", "lock_queue"), seed
        assert "one at a time" in diagnosis.findings[0].evidence[0]


def test_short_waits_for_a_lock_are_no_slow_code() -> None:
    for seed in range(10):
        diagnosis = diagnose_requests(serve_one_at_a_time(random.Random(seed), every=70, call_ms=40))
        assert diagnosis.verdict in ("queueing", "healthy"), seed


def test_waits_are_as_long_as_measured() -> None:
    records = serve_one_at_a_time(random.Random(1))
    waits = find_serialized_waits(records)
    for record, waited in zip(records, waits):
        assert record.breakdown is not None
        own = record.breakdown.causes.get("application", 0)
        assert waited in (0, own) and (waited or own < 20e6)


def test_slow_code_is_no_lock() -> None:
    for seed in range(10):
        records = prepare_slowly(random.Random(seed))
        assert not find_serialized_waits(records).any(), seed
        diagnosis = diagnose_requests(records)
        assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("pre_engine", "application"), seed


def test_few_waits_are_no_evidence() -> None:
    assert not find_serialized_waits(serve_one_at_a_time(random.Random(1), count=4)).any()
    assert not len(find_serialized_waits([]))
