"""The function in which the time of a cause passes is named, with its share of the sampled time."""

from __future__ import annotations

from typing import Any

from otel_infer.analysis.diagnosis.code_places import describe_code, find_code_places
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord
from otel_infer.ringbuffer import events

MS = 1_000_000


def sample(
    since: int, at: int, reason: str, function: str = "lookup", line: int = 31, **more: Any
) -> events.CodeLocated:
    return events.CodeLocated(at * MS, since * MS, reason, function, "/srv/app.py", line, **more)


def record(*samples: events.CodeLocated, causes: dict[str, int] | None = None, **more: Any) -> RequestRecord:
    """A request from 0 to 1000 ms with its first token at 500 and its last at 800 ms."""
    record = RequestRecord(
        bytes(16), bytes(8), b"", b"", True, False, "chat", "chat", "", "m", "toy", 0, 1000 * MS, 0
    )
    record.first_token_at, record.last_token_at = 500 * MS, 800 * MS
    record.code_samples = samples
    record.breakdown = LatencyBreakdown(causes or {}, None)
    for name, value in more.items():
        setattr(record, name, value)
    return record


def test_a_sample_of_a_loop_stands_for_its_pause() -> None:
    late = sample(100, 130, "event_loop"), sample(300, 330, "event_loop", "check_quota", 7)
    pauses = Pause(100 * MS, 160 * MS, "event_loop"), Pause(300 * MS, 480 * MS, "event_loop")
    slow = record(*late, causes={"event_loop": 240 * MS}, loop_pauses=pauses)
    assert describe_code([slow], "event_loop") == [
        "75% of event_loop is `check_quota` at app.py:7 (1 sample)",
        "25% of event_loop is `lookup` at app.py:31 (1 sample)",
    ]


def test_only_the_requests_with_most_of_the_cause_count() -> None:
    slow = [record(sample(0, 300, "request"), causes={"ingress": 300 * MS}) for _ in range(3)]
    others = [record(sample(0, 400, "request", "train"), causes={}) for _ in range(20)]
    assert [place.function for place in find_code_places(others + slow, "ingress")] == ["lookup"]


def test_requests_with_less_of_the_cause_are_evidence_where_the_others_have_no_sample() -> None:
    """Samples have a budget, so the slowest requests may have none."""
    slow = [record(causes={"ingress": 300 * MS}) for _ in range(5)]
    usual = [record(sample(0, 200, "request"), causes={"ingress": 200 * MS}) for _ in range(20)]
    fast = [record(sample(0, 400, "request", "train"), causes={"ingress": 9 * MS}) for _ in range(20)]
    assert describe_code([*fast, *usual, *slow], "ingress") == [
        "100% of ingress is `lookup` at app.py:31 (1 sample)"
    ]
    assert describe_code([*fast, *slow], "ingress") == [] == describe_code([], "ingress")
    assert find_code_places([*fast, *usual, *slow], "ingress") == []


def test_the_code_that_allocates_is_named_for_garbage_collection() -> None:
    """A late loop counts only while garbage is collected."""
    late = sample(100, 150, "event_loop", "parse", 7), sample(600, 650, "event_loop", "log")
    pauses = Pause(120 * MS, 400 * MS, "gc"), Pause(700 * MS, 710 * MS, "gc"), Pause(640 * MS, 660 * MS, "x")
    slow = record(*late, causes={"gc": 290 * MS}, pauses=pauses)
    assert describe_code([slow], "gc") == ["100% of gc is `parse` at app.py:7 (1 sample)"]


def test_a_cause_counts_in_its_own_part_of_a_request() -> None:
    samples = sample(100, 400, "request", "look_up"), sample(820, 990, "request", "save")
    both = record(*samples, causes={"ingress": 300 * MS, "egress": 200 * MS})
    assert [place.function for place in find_code_places([both], "ingress")] == ["look_up"]
    assert [place.function for place in find_code_places([both], "egress")] == ["save"]


def test_other_reasons_do_not_explain_a_cause() -> None:
    late = record(sample(100, 400, "request"), causes={"blocked": 300 * MS, "decode": 100 * MS})
    assert describe_code([late], "blocked") == describe_code([late], "decode") == []
    assert describe_code([late], "not a cause") == []


def test_the_same_sample_of_many_requests_counts_once() -> None:
    requests = [record(sample(100, 400, "step"), causes={"blocked": 300 * MS}) for _ in range(3)]
    assert [place.samples for place in find_code_places(requests, "blocked")] == [1]


def test_the_line_that_was_found_most_is_named() -> None:
    samples = (
        sample(0, 10, "request", line=5),
        sample(0, 200, "request", line=6),
        sample(0, 20, "request", line=5),
    )
    (place,) = find_code_places([record(*samples, causes={"ingress": MS})], "ingress")
    assert (place.line, place.samples, place.share) == (6, 3, 1.0)


def test_callee_and_waiter_are_named() -> None:
    late = sample(
        0, 300, "request", callee="read /site/redis/connection.py:9", waiter="handle /srv/app.py:40"
    )
    assert describe_code([record(late, causes={"lock_queue": MS})], "lock_queue") == [
        "100% of lock_queue is `lookup` at app.py:31, in `read` (redis/connection.py:9), which `handle` (srv/app.py:40) waits for (1 sample)"
    ]


def test_the_reasons_are_those_that_are_recorded() -> None:
    assert {events.PAUSE_EVENT_LOOP, events.STALLED_STEP, events.STALLED_REQUEST} == {
        "event_loop",
        "step",
        "request",
    }
