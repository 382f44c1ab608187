"""Small requests that wait behind large ones, and large ones that wait for each other."""

from __future__ import annotations

import random

from otel_infer.analysis.diagnosis.queueing import QueueAnalysis
from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.assembly.records.request import RequestRecord
from tests.unit.analysis.diagnosis.test_time_by_complaint import make_record

LARGE_MS, SMALL_MS, EVERY = 60.0, 5.0, 3


def serve(small_wait_ms: float) -> list[RequestRecord]:
    """Returns requests of which each third is large, and waits until the large one before it has ended."""
    return [
        make_record(
            10.0 * number,
            {
                "ingress": 1,
                "work_queue": number * (LARGE_MS / EVERY - 10) if number % EVERY == 0 else small_wait_ms,
                "decode": LARGE_MS if number % EVERY == 0 else SMALL_MS,
                "egress": 1,
            },
        )
        for number in range(60)
    ]


def test_small_requests_that_wait_as_long_are_behind_large_ones() -> None:
    evidence = QueueAnalysis(serve(300)).waiting_behind_large()
    assert evidence is not None and "of the waiting time of small requests" in evidence
    finding = next(each for each in diagnose_requests(serve(300)).findings if each.cause == "work_queue")
    assert finding.symptom == "head_of_line_blocking"
    assert finding.change.startswith("serve large requests separately")


def test_large_requests_in_a_queue_of_their_own_delay_no_small_ones() -> None:
    """Each model has its queue and its thread: what the small requests wait is little, and chance."""
    assert QueueAnalysis(serve(1)).waiting_behind_large() is None


def test_workers_that_call_no_model_meanwhile_are_not_too_few() -> None:
    """A batcher by hand whose window is none that a hook sees: every request waits, and no call of the model runs."""
    draw = random.Random(1)
    waits = [{"ingress": 2, "work_queue": draw.uniform(70, 90), "decode": 5, "egress": 1} for _ in range(60)]
    idle = diagnose_requests([make_record(100.0 * number, causes) for number, causes in enumerate(waits)])
    (finding,) = idle.findings
    assert (finding.symptom, finding.cause) == ("queueing", "work_queue")
    assert "100% of the waiting time passed while no model was called" in finding.evidence
    assert finding.change.startswith("see what the workers do between two calls of the model")


def test_workers_that_call_the_model_all_the_time_are_too_few() -> None:
    records = [
        make_record(80.0 * number, {"ingress": 2, "work_queue": 160, "decode": 80, "egress": 1})
        for number in range(60)
    ]
    (finding,) = diagnose_requests(records).findings
    assert finding.change.startswith("more or faster workers")


def test_larger_batches_are_no_change_where_other_items_take_most_of_a_call() -> None:
    """A batch that is padded to its longest item, for example."""
    records = [
        make_record(
            80.0 * number, {"ingress": 2, "work_queue": 160, "decode": 20, "batching": 60, "egress": 1}
        )
        for number in range(60)
    ]
    finding = next(each for each in diagnose_requests(records).findings if each.cause == "work_queue")
    assert "the other items of a batch take 75% of the time of a call" in finding.evidence
    assert finding.change.startswith("items of about the same length")
