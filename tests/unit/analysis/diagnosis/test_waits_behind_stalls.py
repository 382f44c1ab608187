"""Waits in a queue that exist because the requests ahead were stalled count as the stall's, not as the queue's."""

from __future__ import annotations

import heapq
import random

import pytest

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.analysis.diagnosis.waits_behind_stalls import find_waits_behind_stalls
from otel_infer.assembly.records.request import RequestRecord
from tests.support.served_load import MS
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record

RUN_MS = 100.0
Arrivals = list[tuple[float, float]]
"""When a request arrives, and for how long its run is stalled, ms."""


def serve(arrivals: Arrivals, places: int = 1, other_wait_ms: float = 0.0) -> list[RequestRecord]:
    """Returns requests that wait for one of so many places. `other_wait_ms`: how long they wait besides."""
    free_at, records = [0.0] * places, []
    for at, stall in arrivals:
        begin = max(at + 1 + other_wait_ms, free_at[0] + 0.5)
        heapq.heapreplace(free_at, begin + RUN_MS + stall)
        causes = {"ingress": 1, "work_queue": begin - at - 1, "decode": RUN_MS, "gc": stall, "egress": 1}
        record = make_record(at, {cause: ms for cause, ms in causes.items() if ms})
        decode = record.find_stage("decode")
        assert decode is not None
        record.stages[record.stages.index(decode)] = decode._replace(ended_at=decode.ended_at + int(stall * MS))
        records.append(record)
    return records


def draw_arrivals(seed: int, every_ms: float = 180.0, stall_ms: float = 70.0) -> Arrivals:
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(60):
        at += draw.expovariate(1 / every_ms)
        arrivals.append((at, stall_ms * draw.uniform(0.5, 1.5)))
    return arrivals


def without_stalls(arrivals: Arrivals) -> Arrivals:
    return [(at, 0.0) for at, _ in arrivals]


def queue_ns(records: list[RequestRecord]) -> list[int]:
    return [record.breakdown.causes.get("work_queue", 0) for record in records if record.breakdown is not None]


@pytest.mark.parametrize("places", [1, 2, 4])
def test_waits_are_what_the_same_load_would_not_wait_without_stalls(places: int) -> None:
    for seed in range(5):
        arrivals = draw_arrivals(seed, every_ms=150.0 / places)
        measured, better = serve(arrivals, places), serve(without_stalls(arrivals), places)
        found = find_waits_behind_stalls(measured).sum()
        saved = sum(queue_ns(measured)) - sum(queue_ns(better))
        assert found == pytest.approx(saved, rel=0.05), seed


def test_stalls_that_make_a_queue_are_the_verdict() -> None:
    """One request at a time, of which the collector takes 40 % on top: the queue is longer than the pauses themselves."""
    for seed in range(10):
        diagnosis = diagnose_requests(serve(draw_arrivals(seed)))
        assert diagnosis.verdict == "stutter", seed
        first, *others = diagnosis.findings
        assert first.cause == "gc"
        assert any("less in the queue on average" in evidence for evidence in first.evidence), first.evidence
        assert all(other.weight < first.weight for other in others)


def test_queue_of_more_requests_than_the_server_bears_stays_a_queue() -> None:
    for seed in range(10):
        diagnosis = diagnose_requests(serve(draw_arrivals(seed, every_ms=90.0, stall_ms=2.0)))
        assert diagnosis.verdict in ("queueing", "peak"), seed


def test_queue_of_another_kind_is_left_alone() -> None:
    """They wait for something else than the runs of others, so fewer stalls would not shorten their waits."""
    records = serve(draw_arrivals(1, every_ms=1000.0), other_wait_ms=400.0)
    assert find_waits_behind_stalls(records).sum() == 0


def test_nothing_is_found_without_waits_or_stalls() -> None:
    assert find_waits_behind_stalls([]).sum() == 0
    assert find_waits_behind_stalls(serve([(1000.0 * i, 50.0) for i in range(20)])).sum() == 0
    assert find_waits_behind_stalls(serve(without_stalls(draw_arrivals(1)))).sum() == 0
