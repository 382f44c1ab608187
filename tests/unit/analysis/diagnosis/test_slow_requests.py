"""The slowest requests, and the delays of the event loop in their streams."""

from __future__ import annotations

import pytest

from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.analysis.diagnosis.slow_requests import (
    app_time_before_token,
    loop_delay_before_token,
    loop_delays_while_streaming,
    median_gap_ms,
    name_first_latency,
    select_slowest,
    sum_cause_time,
)
from otel_infer.assembly.records.request import RequestRecord, Stage
from tests.support.story import RequestHandle, Story

MS = 1_000_000


def generated(story: Story, submitted: int, first: int, last: int, gap: int) -> RequestHandle:
    """A request that reaches the engine at `submitted`, has its first token at `first`, its last at `last`, and a token in each `gap` (ms)."""
    a = story.arrives(0)
    story.submitted(submitted, a)
    story.step(submitted, first, [a], {a: 4})
    for at in range(first, last, gap):
        story.step(at, at + gap, [a])
    return a


def served(*paused: tuple[float, float, str]) -> RequestRecord:
    """A request that reaches the engine at 100, has its first token at 110 and its last at 200, in steps of 10 ms."""
    story = Story()
    a = generated(story, 100, 110, 200, 10)
    for since, until, cause in paused:
        story.paused(since, until, cause)
    story.ends(220, a, chunks=10)
    record = story.record()
    attribute_latency([record])
    return record


def test_loop_delay_is_split_at_the_first_token() -> None:
    record = served((20, 60, "event_loop"), (105, 150, "event_loop"), (160, 185, "event_loop"))
    assert loop_delay_before_token(record) == 40 * MS
    assert loop_delays_while_streaming(record) == [40 * MS, 25 * MS]


def test_loop_delay_while_the_request_is_in_its_socket_is_not_counted_twice() -> None:
    record = served((20, 60, "event_loop"))
    record.stages = (Stage("accept", record.arrived_at, record.arrived_at + 50 * MS, 0), *record.stages)
    assert loop_delay_before_token(record) == 10 * MS


def test_process_pauses_are_not_loop_delays() -> None:
    record = served((120, 180, "event_loop"), (110, 140, "gc"), (130, 150, "compile"))
    assert loop_delays_while_streaming(record) == [30 * MS]
    assert loop_delays_while_streaming(served((120, 140, "event_loop"), (110, 140, "gc"))) == []


def test_loop_delay_without_waiting_request_is_not_counted() -> None:
    assert loop_delay_before_token(served((20, 100, "event_loop"))) == 0


def test_slowest_are_a_tenth_and_at_least_three() -> None:
    records = [served() for _ in range(40)]
    assert len(select_slowest(records, lambda record: record.duration_ns).records) == 4
    few = select_slowest(records[:5], lambda record: record.duration_ns)
    assert len(few.records) == 3
    assert few.total_ns("prefill", "decode") == sum(
        sum_cause_time(record, "prefill", "decode") for record in few.records
    )
    assert few.lifetime_share("prefill", "decode") == few.reference_share("prefill", "decode") == 100 / 220


def test_median_gap_is_per_token_not_per_step() -> None:
    """With two steps in flight, each step lasts two gaps."""
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    pending = story.scheduled(10, [a])
    for n in range(2, 20):
        following = story.scheduled(10 * n, [a])
        story.done(10 * n + 10, pending)
        pending = following
    story.ends(210, a)
    assert median_gap_ms([story.record(a)]) == 10


def test_enclosing_stage_before_first_token_is_application() -> None:
    story = Story()
    a = generated(story, 610, 800, 2800, 20)
    story.stage("handle", 0, 2805, a)
    story.ends(2810, a)
    record = story.record()
    attribute_latency([record])
    assert app_time_before_token(record) / MS == pytest.approx(610, abs=10)


def test_a_request_without_tokens_has_a_result() -> None:
    classified, streamed = served(), served()
    classified.first_token_at = 0
    assert name_first_latency([classified]) == "the time to the result"
    assert name_first_latency([classified, streamed]) == "the time to the first token"
