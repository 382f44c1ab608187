"""HTTP requests whose model calls are not connected with them, and requests that failed in the queue."""

from __future__ import annotations

from typing import Any

from otel_infer import semconv
from otel_infer.analysis.diagnosis.failed_waits import add_failed_waits
from otel_infer.analysis.diagnosis.rules import Diagnosis, diagnose_requests
from otel_infer.analysis.diagnosis.unfollowed import (
    describe_unfollowed,
    replace_by_unfollowed,
    select_explained,
)
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.ringbuffer import events

MS = 1_000_000
HEALTHY = Diagnosis("healthy", 20, [], {}, "")


def make_record(length_ms: int = 100, stages: tuple[str, ...] = (), **more: Any) -> RequestRecord:
    """Returns an HTTP request with its SERVER span, without a model."""
    known: dict[str, Any] = {
        "trace_id": b"t", "span_id": b"s", "parent_span_id": b"", "server_span_id": b"s", "name": "POST", "operation": "",
        "provider": "", "model": "", "engine": "", **more,
    }  # fmt: skip
    return RequestRecord(
        **known,
        sampled=True,
        remote_parent=False,
        arrived_at=0,
        ended_at=length_ms * MS,
        wall_offset=0,
        stages=[Stage(name, 0, length_ms * MS, {}) for name in stages],
    )


def make_call() -> RequestRecord:
    """Returns a call of a model that belongs to no request."""
    return make_record(2, ("forward",), server_span_id=b"", name="inference", operation="inference")


def test_calls_of_nobody_say_nothing_of_the_requests() -> None:
    finished = [*(make_record() for _ in range(20)), *(make_call() for _ in range(5))]
    note = describe_unfollowed(finished)
    assert note.startswith(
        "20 HTTP requests (p50 100 ms, p95 100 ms) contain no call of a model, and 5 calls"
    )
    assert "`otel_infer.item()`" in note
    diagnosis = replace_by_unfollowed(HEALTHY, note)
    assert (diagnosis.verdict, diagnosis.note) == ("insufficient", note)


def test_a_queue_without_a_model_asks_for_a_stage() -> None:
    note = describe_unfollowed([make_record(stages=(semconv.SPAN_QUEUE_WAIT,)) for _ in range(20)])
    assert note.startswith("20 HTTP requests (p50 100 ms") and '`with otel_infer.stage("forward")`' in note


def test_requests_without_a_model_state_where_it_may_be() -> None:
    """A library that is not instrumented, another server behind this one, or a worker of jobs."""
    unseen = [make_record() for _ in range(20)]
    note = describe_unfollowed(unseen)
    assert note.startswith(
        "20 HTTP requests (p50 100 ms, p95 100 ms) contain no call of a model. If this server"
    )
    assert '`with otel_infer.stage("forward")`' in note and "another server" in note


def test_requests_are_shown_instead_of_calls_of_nobody() -> None:
    """The latency of the calls is not the clients'."""
    requests, calls = [make_record() for _ in range(20)], [make_call() for _ in range(5)]
    assert select_explained([*requests, *calls], "unfollowed") == requests
    assert select_explained([*requests, *calls], "") == calls


def test_requests_with_their_model_calls_are_followed() -> None:
    served = [make_record(stages=("forward",), operation="inference") for _ in range(20)]
    health = [make_record(1, name="GET") for _ in range(90)]
    login = [make_record(1) for _ in range(5)]
    assert describe_unfollowed([*served, *health, *login, make_call()]) == ""
    unseen = [make_record() for _ in range(20)]
    assert describe_unfollowed([*served[:3], *unseen]) == "", "some requests call a model, others none"
    assert describe_unfollowed([make_call() for _ in range(20)]) == "", "a loop without requests"
    assert replace_by_unfollowed(HEALTHY, "") is HEALTHY


def test_requests_that_fail_in_the_queue_are_the_complaint() -> None:
    served = [make_record(30, ("forward",), operation="inference") for _ in range(10)]
    failed = [
        make_record(120, (semconv.SPAN_QUEUE_WAIT,), outcome=events.ERROR, error_type="timeout")
        for _ in range(10)
    ]
    assert not any(record.failed_in_queue for record in served)
    diagnosis = add_failed_waits(HEALTHY, [*served, *failed])
    (finding,) = diagnosis.findings
    assert (diagnosis.verdict, finding.symptom, finding.cause) == ("queueing", "queueing", "work_queue")
    assert finding.weight == 0.8 and diagnosis.describe_share(finding) == "80% of the time of all requests"
    assert finding.evidence == [
        "10 of 20 requests failed before a worker had called the model for them",
        "they had waited in the queue for 120 ms (p50)",
    ]
    assert add_failed_waits(HEALTHY, [*served, *failed[:2]]) is HEALTHY


def test_failed_requests_are_no_served_ones() -> None:
    failed = [make_record(120, (semconv.SPAN_QUEUE_WAIT,), outcome=events.ERROR) for _ in range(20)]
    assert add_failed_waits(diagnose_requests(failed), failed).verdict == "queueing"


def make_worked(*calls_ms: int, length_ms: int = 100, responds_ms: int = 20) -> RequestRecord:
    """Returns a request that a worker took after 10 ms, and its calls of a model, 2 ms each."""
    record = make_record(length_ms, operation="inference")
    record.stages = [
        Stage(semconv.SPAN_QUEUE_WAIT, 0, 10 * MS, {}),
        Stage(semconv.SPAN_POSTPROCESS, responds_ms * MS, length_ms * MS, {}),
        *(Stage(semconv.SPAN_FORWARD, at * MS, (at + 2) * MS, {}) for at in calls_ms),
    ]
    return record


def test_a_loop_that_serves_requests_in_turn_has_no_verdict() -> None:
    """Decode steps of all requests are calls of a request that the loop took last."""
    others, last = (
        [make_worked(10, 15) for _ in range(20)],
        [make_worked(10, 15, *range(25, 90)) for _ in range(4)],
    )
    note = describe_unfollowed([*others, *last])
    assert note.startswith(
        "a worker's loop calls the model for several requests in turn: 260 calls of a model"
    )
    assert "`with otel_infer.step(requests)`" in note
    assert select_explained([*others, *last], note) == [*others, *last]


def test_workers_that_serve_one_request_after_another_have_a_verdict() -> None:
    streams, short = (
        [make_worked(*range(10, 95, 5)) for _ in range(20)],
        [make_worked(10, length_ms=14, responds_ms=12) for _ in range(30)],
    )
    assert describe_unfollowed([*streams, *short]) == "", "the short ones end soon after their call"
    assert describe_unfollowed([*streams, *(make_worked(10) for _ in range(5))]) == "", "most are streams"
    assert describe_unfollowed([make_worked(10) for _ in range(20)]) == "", "all end late"
