"""Waits in a queue that exist because the requests ahead were stalled count as the stall's, not as the queue's."""

from __future__ import annotations

import heapq
import random

import pytest

from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.analysis.diagnosis.waits_behind_stalls import find_waits_behind_stalls
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord
from tests.support.served_load import MS
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record

RUN_MS = 100.0
Arrivals = list[tuple[float, float]]
"""When a request arrives, and for how long its run is stalled, ms."""


def serve(arrivals: Arrivals, places: int = 1, other_wait_ms: float = 0.0) -> list[RequestRecord]:
    """Returns requests that wait for one of so many places. A run begins with its stall, a pause of the whole process.

    `other_wait_ms`: how long they wait besides.
    """
    free_at, runs = [0.0] * places, []
    for at, stall in arrivals:
        begin = max(at + 1 + other_wait_ms, free_at[0] + 0.5)
        heapq.heapreplace(free_at, begin + RUN_MS + stall)
        runs.append((at, begin, stall))
    pauses = [Pause(int(begin * MS), int((begin + stall) * MS), "gc") for _, begin, stall in runs if stall]
    return [make_request(at, begin, stall, pauses if places == 1 else []) for at, begin, stall in runs]


def make_request(at: float, begin: float, stall: float, pauses: list[Pause]) -> RequestRecord:
    """Returns a request. The pauses in its wait are no time in the queue."""
    since, until = int((at + 1) * MS), int(begin * MS)
    seen = tuple(
        pause for pause in pauses if pause.started_at < until + stall * MS and pause.ended_at > since
    )
    paused = sum(max(min(pause.ended_at, until) - max(pause.started_at, since), 0) for pause in seen)
    wait = begin - at - 1
    record = make_record(at, {"ingress": 1, "work_queue": wait, "decode": RUN_MS + stall, "egress": 1})
    record.pauses = seen
    causes = {"ingress": MS, "work_queue": int(wait * MS) - paused, "decode": int(RUN_MS * MS), "egress": MS}
    causes["gc"] = int(stall * MS) + paused
    record.breakdown = LatencyBreakdown({cause: ns for cause, ns in causes.items() if ns}, None)
    return record


def draw_arrivals(seed: int, every_ms: float = 180.0, stall_ms: float = 70.0) -> Arrivals:
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(60):
        at += draw.expovariate(1 / every_ms)
        arrivals.append((at, stall_ms * draw.uniform(0.5, 1.5)))
    return arrivals


def without_stalls(arrivals: Arrivals) -> Arrivals:
    return [(at, 0.0) for at, _ in arrivals]


def sum_waits(records: list[RequestRecord]) -> int:
    """Returns the time in the queue, with the pauses in it."""
    waits = [record.find_stage("queue wait") for record in records]
    return sum(wait.ended_at - wait.started_at for wait in waits if wait is not None)


def sum_pauses_in_waits(records: list[RequestRecord]) -> int:
    waited = sum(record.breakdown.causes.get("work_queue", 0) for record in records if record.breakdown)
    return sum_waits(records) - waited


@pytest.mark.parametrize("places", [1, 2, 4])
def test_waits_are_what_the_same_load_would_not_wait_without_stalls(places: int) -> None:
    for seed in range(5):
        arrivals = draw_arrivals(seed, every_ms=150.0 / places)
        measured, better = serve(arrivals, places), serve(without_stalls(arrivals), places)
        found = find_waits_behind_stalls(measured).sum()
        saved = sum_waits(measured) - sum_waits(better)
        assert found + sum_pauses_in_waits(measured) == pytest.approx(saved, rel=0.1), seed


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
