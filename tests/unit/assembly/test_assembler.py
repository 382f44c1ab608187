"""Events in, records out: for any events in any order, each request yields one record with plausible values."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import file
from tests.support.simulator import Simulator, Tick, ticks
from tests.support.story import AFTER_ALL_EVENTS, BASE, PROCESS, WALL, Story, ids, ms, ns

GRACE_MS = GRACE_NS // 1_000_000


def drained_records(recorded: list[events.RecordedEvent]) -> list[RequestRecord]:
    assembler = Assembler()
    assembler.feed_events(recorded)
    return assembler.drain_records(AFTER_ALL_EVENTS)


def comparable(record: RequestRecord) -> dict[str, Any]:
    """Returns the fields of a record for comparison, with its latency attribution."""
    attribute_latency([record])
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    del fields["prefills_by_step"], fields["thread_delays"]  # references to the step log, not values
    steps = fields["steps"]
    return {**fields, "steps": steps.table.tolist() if steps is not None else None}


# ── arbitrary events ─────────────────────────────────────────────────────────────────────────────────────────────

instants = st.one_of(st.integers(0, 50), st.integers(0, 1 << 40), st.sampled_from([GRACE_NS, GRACE_NS + 1]))
counts = st.integers(0, 5)
words = st.sampled_from(["", "decode", "tokenize", "recompute", "offload", "abort", "x"])
some_ids = st.sampled_from([bytes(8), b"a" * 8, b"b" * 8])
phases = st.sampled_from([events.WEIGHTS, events.READY])
pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=4).map(tuple)
attributes = st.dictionaries(words, st.one_of(words, counts), max_size=2)
ended = st.builds(
    events.RequestEnded, instants, st.integers(0, 2), words, st.sampled_from([0, 200]), counts, counts, counts
)
arrived = st.builds(
    events.RequestArrived, instants, instants, some_ids.map(lambda i: i * 2), some_ids, some_ids, some_ids,
    st.integers(0, 15), words, words, words, words,
)  # fmt: skip
request_events = st.one_of(
    arrived,
    ended,
    st.builds(events.StageEnded, instants, instants, words, counts),
    st.builds(events.RequestSubmitted, instants, counts, counts, counts, words),
    st.builds(events.RequestReceived, instants),
    st.builds(events.RequestScheduled, instants),
    st.builds(events.RequestPreempted, instants, words),
    st.builds(events.TokenReached, instants),
    st.builds(events.FirstTokenSent, instants),
    st.builds(events.ResponseStarted, instants),
    st.builds(events.EngineFinished, instants, words, counts),
    st.builds(events.AttributeSet, instants, words, counts),
    st.builds(events.SpanEventAdded, instants, words, attributes),
    st.builds(events.SpanLinked, instants, some_ids.map(lambda i: i * 2), some_ids),
    st.builds(events.LinkDescribed, instants, some_ids.map(bytes.hex), attributes),
    st.builds(events.NameUpdated, instants, words),
    st.builds(events.HttpDescribed, instants, words, words, words),
    st.builds(
        events.LiveRecovered, instants, instants, some_ids.map(lambda i: i * 2), some_ids, some_ids, counts
    ),
)
process_events = st.one_of(
    st.builds(events.HooksReported, instants, words, counts, counts),
    st.builds(events.EventsLost, instants, counts, counts),
    st.builds(events.PauseSeen, instants, instants, words),
    st.builds(events.MarkSeen, instants, instants, words, st.integers(0, 9)),
    st.builds(events.ProcessSeen, instants, counts, words, st.just(0)),
    st.builds(events.EngineSeen, instants, st.integers(1, 2), counts, words),
    st.builds(events.ProcessDied, instants),
    st.builds(events.ProcessStarted, instants, instants, some_ids.map(lambda i: i * 2), some_ids),
    st.builds(events.ModuleImported, instants, st.sampled_from(["torch", "uvicorn.config"])),
    st.builds(events.PhaseBegan, instants, phases),
    st.builds(
        events.PhaseEnded, instants, instants, phases, st.sampled_from(["lifespan", "engine"]), words, words
    ),
    st.builds(events.ProcessLeft, instants, words),
    st.builds(events.LiveListed, instants, st.lists(counts, max_size=3)),
)
step_events = st.one_of(
    st.builds(
        events.StepScheduled, instants, st.integers(0, 12), st.booleans(), counts, st.lists(counts, max_size=3),
        st.lists(counts, max_size=3), pairs, counts, counts, counts, counts,
    ),
    st.builds(events.StepDone, instants, st.integers(0, 12), pairs, counts),
    st.builds(events.StepsLost, instants, counts),
)  # fmt: skip
any_event = st.one_of(
    st.builds(events.RecordedEvent, st.integers(1, 2), st.integers(0, 4), request_events),
    st.builds(events.RecordedEvent, st.integers(1, 2), st.just(0), process_events),
    st.builds(events.RecordedEvent, st.integers(10, 11), st.just(0), step_events),
)
ENGINES = [events.RecordedEvent(ring, 0, events.EngineSeen(0, ring - 9, 1, "toy")) for ring in (10, 11)]


@st.composite
def plausible(draw: st.DrawFn) -> list[events.RecordedEvent]:
    """Well-formed steps of two requests, with arbitrary events in between."""
    recorded = list(ENGINES)
    at = 1
    for handle in (1, 2):
        arrived = events.RequestArrived(
            1, 1, bytes([handle]) * 16, bytes([handle]) * 8, bytes(8), bytes(8), 1, "chat", "", "m", ""
        )
        recorded.append(events.RecordedEvent(1, handle, arrived))
    for step in range(1, draw(st.integers(0, 8)) + 1):
        batch = draw(st.lists(st.integers(0, 3), max_size=4))
        scheduled = events.StepScheduled(at, step, True, len(batch), (), batch, draw(pairs), 0, 0, 0, 0)
        recorded.append(events.RecordedEvent(10, 0, scheduled))
        at += draw(st.integers(0, 5))
        if draw(st.booleans()):
            recorded.append(events.RecordedEvent(10, 0, events.StepDone(at, step, draw(pairs), 0)))
        recorded += draw(st.lists(any_event, max_size=2))
    return recorded + [events.RecordedEvent(1, handle, draw(ended)) for handle in (1, 2)]


def records_decode_itself(recorded: list[events.RecordedEvent]) -> bool:
    """Returns whether an application records a stage `decode`, which stands in place of the one from the steps."""
    stages = [each.event for each in recorded if isinstance(each.event, events.StageEnded)]
    return any(stage.stage == semconv.SPAN_DECODE for stage in stages)


def check(record: RequestRecord, has_own_decode: bool) -> None:
    assert record.arrived_at <= record.ended_at
    for stage in record.stages:
        assert record.arrived_at <= stage.started_at <= stage.ended_at <= record.ended_at
    assert record.output_tokens >= 0
    assert record.ttft_ns >= 0
    for chunk in record.prefill_steps:
        prefill = record.find_stage("prefill")
        assert chunk.tokens > 0
        assert record.arrived_at <= chunk.started_at < chunk.ended_at <= record.ended_at
        assert prefill is None or chunk.ended_at <= prefill.ended_at
    if record.steps is not None:
        check_steps(record, record.steps, has_own_decode)


def check_steps(record: RequestRecord, rows: RequestSteps, has_own_decode: bool) -> None:
    assert rows.table.shape == (6, len(rows))
    assert len(rows) > 0
    assert (rows.tokens > 0).all()
    assert (rows.others_prefill_tokens >= 0).all()
    assert (rows.started_at <= rows.ended_at).all()
    assert (rows.started_at >= record.arrived_at).all()
    assert (rows.ended_at <= record.ended_at).all()
    decode = record.find_stage("decode")
    if decode is not None and len(rows) > 1 and not has_own_decode:
        assert decode.started_at <= int(rows.started_at[1:].min())
        assert int(rows.ended_at.max()) <= decode.ended_at or record.telemetry_lost


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(any_event, max_size=60), plausible()))
def test_any_events_in_any_order_yield_plausible_records(
    recorded: list[events.RecordedEvent],
) -> None:
    assembler = Assembler()
    assembler.feed_events(ENGINES)
    assembler.feed_events(recorded)
    for record in assembler.drain_records(AFTER_ALL_EVENTS):
        check(record, records_decode_itself(recorded))
    for step in assembler.drain_steps():
        assert step.prefill_tokens >= 0 and step.decode_tokens >= 0
    assert set(assembler.count_active()) == {"queued", "running"}


@settings(max_examples=200, deadline=None)
@given(st.lists(any_event, max_size=40), st.permutations([1, 2, 3]), st.lists(ended, min_size=3, max_size=3))
def test_each_ended_request_yields_one_record(
    between: list[events.RecordedEvent], order: list[int], ends: list[events.RequestEnded]
) -> None:
    """Events of other rings in between do not change that."""
    between = [recorded for recorded in between if recorded.ring != 1]
    assembler = Assembler()
    opened = [
        events.RecordedEvent(1, handle, events.RequestArrived(
            1, 1, bytes(16), bytes([handle]) * 8, bytes(8), bytes(8), 1, "chat", "", "m", "n")
        )
        for handle in (1, 2, 3)
    ]  # fmt: skip
    records = []
    for event in [*opened, *between, *(events.RecordedEvent(1, h, e) for h, e in zip(order, ends))]:
        assembler.feed_events([event])
        records += assembler.drain_records(0)
    records += assembler.drain_records(AFTER_ALL_EVENTS)
    assert sorted(record.handle for record in records if record.ring == 1) == [1, 2, 3]
    assert not [key for key in assembler.open_requests if key[0] == 1]


# ── batches and recordings ───────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(ticks(max_ticks=40), st.integers(1, 2), st.lists(st.integers(0, 400), max_size=20), st.booleans())
def test_records_do_not_depend_on_the_batches(
    program: list[Tick], depth: int, cuts: list[int], with_horizons: bool
) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    recorded = simulator.recorded_events
    assert all(before.event.at <= after.event.at for before, after in itertools.pairwise(recorded))
    pieces = Assembler()
    records = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(recorded)]):
        pieces.feed_events(recorded[begin:end])
        if with_horizons and begin < end <= len(recorded):
            records += pieces.drain_records(recorded[end - 1].event.at - 1)
    records += pieces.drain_records(AFTER_ALL_EVENTS)
    assert [comparable(record) for record in records] == [
        comparable(record) for record in drained_records(recorded)
    ]


@settings(max_examples=30, deadline=None)
@given(program=ticks(max_ticks=30))
def test_recording_replays_to_the_same_records(
    program: list[Tick], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tapes") / "a.tape"
    with Simulator(2) as simulator:
        simulator.run(program)
    writer = file.RecordingWriter(path)
    for begin in range(0, len(simulator.recorded_events), 7):
        piece = simulator.recorded_events[begin : begin + 7]
        writer.write(piece, piece[-1].event.at)
    writer.close()
    replayed = [recorded for batch in file.read_batches(path) for recorded in batch.recorded_events]
    live, again = drained_records(simulator.recorded_events), drained_records(replayed)
    assert [comparable(record) for record in again] == [comparable(record) for record in live]


def test_ended_request_waits_for_late_events_only_briefly() -> None:
    for late, expected in ((GRACE_MS, 2), (GRACE_MS + 1, 1)):
        story = Story()
        a = story.arrives(0)
        story.step(10, 20, [a])
        step = story.scheduled(20, [a])
        story.ends(40, a)
        story.done(40 + late, step)
        assert story.record().output_tokens == expected


def test_record_is_drained_exactly_after_the_grace_period() -> None:
    story = Story()
    a = story.arrives(0)
    story.ends(10, a)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert assembler.drain_records(ns(10) + GRACE_NS - 1) == []
    assert len(assembler.drain_records(ns(10) + GRACE_NS)) == 1
    assert assembler.drain_records(AFTER_ALL_EVENTS) == []


# ── handles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handles_of_two_processes_do_not_collide() -> None:
    story = Story()
    other = story.engine(ring=11, process=2)
    a = story.arrives(0, "a", handle=5, process=1)
    b = story.arrives(0, "b", handle=5, process=2)
    story.step(10, 20, [a])
    for at in (30, 40, 50):
        story.step(at, at + 5, [b], engine=other)
    story.ends(60, a)
    story.ends(60, b)
    assert {r.ring: r.output_tokens for r in story.records()} == {1: 1, 2: 3}


def test_request_may_use_two_engines_of_its_process() -> None:
    """One engine computes the prompt, the other decodes."""
    story = Story()
    decoder = story.engine(ring=11)
    a = story.arrives(0)
    story.step(10, 20, [a], {a: 64})
    for at in (30, 40):
        story.step(at, at + 10, [a], engine=decoder)
    story.ends(60, a)
    record = story.record()
    assert record.steps is not None
    assert [ms(at) for at in record.steps.ended_at] == [20, 40, 50]
    assert len(record.prefill_steps) == 1


def test_reused_slot_is_another_request() -> None:
    story = Story()
    first, second = 7 | 1 << 12, 7 | 2 << 12
    a = story.arrives(0, "a", handle=first)
    story.step(10, 20, [a])
    story.ends(21, a)
    b = story.arrives(22, "b", handle=second)
    story.step(30, 40, [a, b], keyframe=True)  # the engine still lists the first request
    story.step(40, 50, [b])
    story.ends(51, b)
    assert {r.handle: r.output_tokens for r in story.records()} == {first: 1, second: 2}


def test_reused_handle_ends_the_unfinished_request() -> None:
    story = Story()
    story.arrives(0, "a", handle=5)
    b = story.arrives(20, "b", handle=5)
    story.ends(30, b)
    first, second = story.records()
    assert (first.telemetry_lost, ms(first.ended_at)) == (True, 0)
    assert (second.telemetry_lost, ms(second.ended_at)) == (False, 30)


def test_repeated_events_count_once() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a, input_tokens=5)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    story.ends(31, a)
    repeated = [
        recorded
        for recorded in story.in_order()
        for _ in range(2)
        if not isinstance(recorded.event, events.RequestSubmitted)
    ]
    (record,) = drained_records(repeated)
    assert record.output_tokens == 2


def test_events_of_unknown_requests_are_ignored() -> None:
    story = Story()
    a = story.arrives(0)
    for handle in (0, 99):
        story.add_event(PROCESS, handle, events.TokenReached(ns(5)))
        story.add_event(PROCESS, handle, events.RequestEnded(ns(6), 0, "", 0, 0, 0, 0))
    story.add_event(77, 0, events.StepDone(ns(7), 1, (), 0))
    story.add_event(77, 0, events.StepsLost(ns(7), 1))
    story.ends(8, a)
    assert len(story.records()) == 1


def test_batch_of_unknown_requests_is_a_step() -> None:
    story = Story()
    a = story.arrives(0)
    unknown = a._replace(handle=0, name="arrived earlier")
    story.step(10, 20, [unknown, a, unknown], {a: 64})
    story.ends(30, a)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    (step,) = assembler.drain_steps()
    assert (step.size, step.prefill_tokens, step.decode_tokens, step.kind) == (3, 64, 2, "mixed")


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_engine_ring_seen_late_waits_for_a_keyframe() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(10, 20, [a], lost=True)
    story.step(20, 30, [a])
    story.step(30, 40, [a], keyframe=True)
    story.step(40, 50, [a])
    story.ends(51, a)
    record = story.record()
    assert record.steps is not None and record.steps.step.tolist() == [3, 4]
    assert (record.telemetry_lost, record.output_tokens) == (True, 0)


def test_unrecorded_step_before_a_keyframe_is_no_loss() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(10, 20, [a])
    story.scheduled(20, [a], lost=True)
    story.step(30, 40, [a], keyframe=True)
    story.ends(41, a)
    record = story.record()
    assert (record.telemetry_lost, record.output_tokens) == (False, 2)


def test_inconsistent_batch_is_ignored() -> None:
    story = Story()
    a, b = story.arrives(0), story.arrives(0, "b")
    story.step(10, 20, [a])
    story.scheduled(20, [a, b], lost=True)
    wrong = events.StepScheduled(ns(20), 2, False, 3, (), (b.handle,), (), 0, 0, 0, 0)
    story.add_event(10, 0, wrong)
    story.done(30, 2)
    story.ends(40, a)
    story.ends(40, b)
    assert [(r.telemetry_lost, r.steps is not None and r.steps.step.tolist()) for r in story.records()] == [
        (True, [1]),
        (True, False),
    ]


def test_arrival_during_an_unknown_batch_is_telemetry_lost() -> None:
    story = Story()
    story.scheduled(10, [], lost=True)
    story.steps_lost(20)
    a = story.arrives(30)
    story.keyframe_next()
    story.step(50, 60, [a])
    story.ends(61, a)
    assert story.record().telemetry_lost


def test_arrival_after_a_recovered_loss_is_complete() -> None:
    story = Story()
    a = story.arrives(0)
    story.scheduled(10, [a], lost=True)
    story.steps_lost(20)
    story.keyframe_next()
    story.step(20, 30, [a])
    b = story.arrives(31, "b")
    story.step(40, 50, [a, b])
    story.ends(51, a)
    story.ends(51, b)
    assert [record.telemetry_lost for record in story.records()] == [True, False]


def test_lost_events_mark_requests_in_flight() -> None:
    story = Story()
    a = story.arrives(0)
    other = story.arrives(0, "other", process=2)
    story.add_event(PROCESS, 0, events.EventsLost(ns(10), 7, 2))
    later = story.arrives(11, "later")
    for member in (a, other, later):
        story.ends(20, member)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert [record.telemetry_lost for record in assembler.drain_records(AFTER_ALL_EVENTS)] == [
        True,
        False,
        False,
    ]
    assert (assembler.events_lost, assembler.events_torn) == (7, 2)


def test_request_missing_from_live_table_has_ended() -> None:
    """Its end is the last time it was seen, not the time of the check."""
    story = Story()
    a, b = story.arrives(0), story.arrives(0, "b")
    story.step(10, 20, [a, b])
    story.step(20, 30, [b])
    story.add_event(PROCESS, 0, events.LiveListed(ns(60_000), [b.handle]))
    story.ends(60_060, b)
    first, second = story.records()
    assert (first.handle, first.telemetry_lost, ms(first.ended_at)) == (a.handle, True, 20)
    assert (second.telemetry_lost, ms(second.ended_at)) == (False, 60_060)


def test_last_event_dates_an_unseen_end() -> None:
    story = Story()
    a, b, c = (story.arrives(0, name) for name in "abc")
    story.add_event(PROCESS, a.handle, events.EngineFinished(ns(40), "stop", 7))
    story.add_event(PROCESS, b.handle, events.StageEnded(ns(45), ns(41), "rerank", 0))
    story.add_event(PROCESS, 0, events.LiveListed(ns(60_000), []))
    assert sorted(ms(record.ended_at) for record in story.records()) == [0, 40, 45]
    assert c.handle


def test_recovered_request_with_arrival_event_is_complete() -> None:
    """A new reader reads the live table first, and then finds the ring intact."""
    story = Story()
    trace_id, span_id = ids("a")
    recovered = events.LiveRecovered(BASE, WALL, trace_id, span_id, ids("caller")[1], events.SAMPLED)
    story.add_event(PROCESS, 1, recovered)
    a = story.arrives(0)
    story.step(10, 20, [a])
    story.ends(30, a)
    record = story.record()
    assert (record.telemetry_lost, record.output_tokens, record.name) == (False, 1, "POST")


def test_requests_of_an_earlier_reader_are_not_repeated() -> None:
    story = Story()
    story.add_event(PROCESS, 0, events.ProcessSeen(0, 4242, "server", ns(1000)))
    a, b = story.arrives(0), story.arrives(1, "b")
    story.step(10, 20, [a, b])
    story.ends(1000 - GRACE_MS, a)
    story.step(1100, 1110, [b])
    story.ends(1200, b)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert [record.span_id for record in assembler.drain_records(AFTER_ALL_EVENTS)] == [ids("b")[1]]
    assert [step.step for step in assembler.drain_steps()] == [2], "steps are not counted twice either"


def test_process_death_clears_its_state() -> None:
    story = Story()
    a = story.arrives(0)
    story.add_event(PROCESS, 0, events.HooksReported(ns(1), "toy", 3, 4))
    story.step(10, 20, [a])
    story.add_event(PROCESS, 0, events.ProcessDied(ns(30)))
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert assembler.drain_records(AFTER_ALL_EVENTS)[0].error_type == "process_died"
    assert (assembler.engines, assembler.processes.hooks, assembler.open_requests) == ({}, {}, {})


def test_repeated_hook_reports_count_once() -> None:
    story = Story()
    for at in (1, 60_000, 120_000):
        story.add_event(PROCESS, 0, events.HooksReported(ns(at), "toy", 3, 4))
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert list(assembler.processes.hooks.values()) == [(3, 4)]


def test_malformed_event_affects_its_request_only() -> None:
    story = Story()
    a, b = story.arrives(0, "a"), story.arrives(0, "b")
    odd: Any = ["no key"]
    story.add_request_event(a, events.AttributeSet(ns(1), odd, 1))
    for member in (a, b):
        story.ends(9, member)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert len(assembler.drain_records(AFTER_ALL_EVENTS)) == 2
    assert assembler.events_torn == 1


def test_without_a_scheduler_only_submitted_requests_are_queued() -> None:
    story = Story()
    story.recorded_events.clear()
    story.arrives(0, "a", operation="")
    submitted = story.arrives(0, "b")
    story.submitted(1, submitted)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert assembler.count_active() == {"queued": 1, "running": 1}


def test_request_is_queued_until_its_first_step() -> None:
    story = Story()
    a, b, c = (story.arrives(0, name) for name in "abc")
    story.step(10, 20, [a, b])
    story.ends(30, a)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert assembler.count_active() == {"queued": 1, "running": 1}
    del c


def test_evicted_steps_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("otel_infer.assembly.engine.step_table.CAPACITY", 16)
    story = Story()
    a = story.arrives(0)
    for at in range(10, 50):
        story.step(at, at + 1, [a])
    story.ends(60, a)
    record = story.record()
    assert record.steps is not None
    assert record.steps.step.tolist() == list(range(25, 41))
    assert record.steps_evicted == 24
    assert (ms(record.first_token_at), ms(record.last_token_at)) == (11, 50)
    assert record.output_tokens == 0, "the token count is unknown"
    assert np.all(record.steps.tokens == 1)


def test_pause_belongs_to_requests_in_flight() -> None:
    story = Story()
    early = story.arrives(0, "early")
    story.ends(10, early)
    later = story.arrives(20, "later")
    story.paused(22, 25)
    story.ends(40, later)
    assert [[(ms(p.started_at), ms(p.ended_at), p.cause) for p in r.pauses] for r in story.records()] == [
        [],
        [(22, 25, "gc")],
    ]


def test_late_pause_is_sorted_by_time() -> None:
    story = Story()
    early = story.arrives(0, "early")
    story.paused(20, 25, "compile")
    story.paused(10, 12)
    story.ends(22, early)
    assembler = Assembler()
    assembler.feed_events(story.recorded_events)
    (record,) = assembler.drain_records(AFTER_ALL_EVENTS)
    assert [(ms(p.started_at), p.cause) for p in record.pauses] == [(10, "gc"), (20, "compile")]


def test_mark_belongs_to_requests_possibly_in_flight() -> None:
    story = Story()
    early, later = story.arrives(0, "early"), story.arrives(20, "later")
    story.ends(10, early)
    story.marked(12, 25, "allocator_retry", 2)
    story.ends(40, later)
    assert [[(ms(m.since), ms(m.at), m.name, m.times) for m in r.marks] for r in story.records()] == [
        [],
        [(12, 25, "allocator_retry", 2)],
    ]


def test_marks_are_drained_once_across_readers() -> None:
    story = Story()
    story.add_event(PROCESS, 0, events.ProcessSeen(0, 1, "server", ns(30)))
    story.marked(20, 25, "allocator_oom")
    story.marked(25, 35, "allocator_oom")
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert [ms(mark.at) for mark in assembler.pauses.drain_marks()] == [35]
    assert assembler.pauses.drain_marks() == []


def test_pauses_are_drained_once_across_readers() -> None:
    story = Story()
    story.add_event(PROCESS, 0, events.ProcessSeen(0, 1, "server", ns(30)))
    story.paused(20, 25)
    story.paused(32, 35)
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert [ms(pause.ended_at) for pause in assembler.pauses.drain_pauses()] == [35]
    assert assembler.pauses.drain_pauses() == []


def test_process_end_keeps_pauses_of_its_requests() -> None:
    story = Story()
    a = story.arrives(20)
    story.paused(22, 25)
    story.ends(40, a)
    story.add_event(PROCESS, 0, events.ProcessDied(ns(60)))
    assert [(ms(p.started_at), ms(p.ended_at)) for p in story.record().pauses] == [(22, 25)]


def test_a_request_that_cannot_be_closed_does_not_keep_the_others_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Damaged events may make it fail; what is due afterwards does not depend on it."""
    story = Story()
    for name in "ab":
        story.ends(10, story.arrives(0, name))
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    closing, failed = OpenRequest.close_at, list[OpenRequest]()

    def fail_once(request: OpenRequest, at: int) -> None:
        if not failed:
            failed.append(request)
            raise ValueError
        closing(request, at)

    monkeypatch.setattr(OpenRequest, "close_at", fail_once)
    late = AFTER_ALL_EVENTS
    with pytest.raises(ValueError):
        assembler.drain_records(late)
    assert len(assembler.drain_records(late)) == 1
    assert assembler.drain_records(late) == []


@pytest.mark.parametrize("outcome", [-1, 3, 65_535, -(1 << 63)])
def test_an_end_with_an_unknown_outcome_is_torn(outcome: int) -> None:
    story = Story()
    request = story.arrives(0, "a")
    story.ends(10, request)
    recorded = [
        each._replace(event=each.event._replace(outcome=outcome))
        if isinstance(each.event, events.RequestEnded)
        else each
        for each in story.in_order()
    ]
    assembler = Assembler()
    assembler.feed_events(recorded)
    assert (assembler.events_torn, assembler.drain_records(AFTER_ALL_EVENTS)) == (1, [])


def test_a_horizon_beyond_all_time_closes_what_there_is() -> None:
    story = Story()
    story.ends(10, story.arrives(0, "a"))
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    assert len(assembler.drain_records(1 << 64)) == 1
    assert assembler.drain_records(1 << 64) == []
