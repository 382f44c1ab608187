"""Where the time of a request went: every ns is given away once, and to whom it belongs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.analysis.attribution import request
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.thread_delays import ThreadDelays
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from tests.support.simulator import Simulator, Tick, ticks
from tests.support.story import LATER, MS, Story, Who, exported, ids, ns
from tests.unit.assembly.test_assembler import ENGINES, anything, plausible


def blamed(said: Any) -> list[RequestRecord]:
    assembler = Assembler()
    assembler.feed_events(said)
    records = assembler.drain_records(LATER)
    request.attribute_latency(records)
    return records


def of(story: Story, who: Who) -> dict[str, float]:
    """ms by cause."""
    (record,) = [record for record in blamed(story.in_order()) if record.span_id == ids(who.name)[1]]
    assert record.breakdown is not None
    assert sum(record.breakdown.causes.values()) == record.duration_ns
    return {cause: length / 1e6 for cause, length in record.breakdown.causes.items()}


def warmed_up(story: Story, steps: int = 40, length: float = 10) -> float:
    """An engine that has shown what its steps cost: 10 ms each, whatever the batch; when it has."""
    early = story.arrives(0, "early", http=False)
    for i in range(steps):
        story.step(i * length, (i + 1) * length, [early])
    story.ends(steps * length, early)
    return steps * length


# ── anything at all ──────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(anything, max_size=60), plausible()))
def test_the_causes_sum_to_the_duration_whatever_is_told(said: list[events.RecordedEvent]) -> None:
    for record in blamed([*ENGINES, *said]):
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        by_class = [length for _, length in record.breakdown.interference_by_class]
        assert sum(by_class) == record.breakdown.causes.get("interference", 0)
        assert all(length > 0 for length in by_class)
        assert all(length > 0 for length in record.breakdown.causes.values())
        streaming = record.breakdown.streaming
        assert all(0 <= streaming[cause] <= record.breakdown.causes.get(cause, 0) for cause in streaming)


@settings(max_examples=60, deadline=None)
@given(ticks(most=60), st.integers(1, 2))
def test_the_causes_sum_to_the_duration_on_an_engine_of_any_schedule(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    for record in blamed(simulator.said):
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns


@settings(max_examples=60, deadline=None)
@given(ticks(most=60), st.integers(1, 2))
def test_requests_come_to_the_same_one_by_one_and_together(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    together = blamed(simulator.said)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("otel_infer.assembly.assembler.STEPS_PER_BATCH", 1)
        patched.setattr("otel_infer.analysis.attribution.request.STEPS_PER_BATCH", 1)
        alone = blamed(simulator.said)
    assert [(one.breakdown, one.summary) for one in alone] == [
        (one.breakdown, one.summary) for one in together
    ]
    for one, other in zip(alone, together):
        assert (one.steps is None) == (other.steps is None)
        assert one.steps is None or other.steps is None or (one.steps.table == other.steps.table).all()


# ── before the engine ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_scheduler_had_not_seen_yet_is_a_queue_of_its_own() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 5, a)
    story.submitted(6, a)
    story.received(36, a)
    story.step(56, 66, [a], {a: 4})
    story.step(66, 76, [a])
    story.ends(78, a, chunks=2)
    assert of(story, a) == {
        "ingress": 2,
        "tokenize": 3,
        "unexplained": 1,
        "hidden_queue": 30,
        "scheduler_queue": 20,
        "prefill": 10,
        "decode": 10,
        "egress": 2,
    }


def test_what_keeps_the_scheduler_from_taking_it_up_is_no_want_of_room() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(2, a)
    story.received(6, a)
    story.stage("grammar", 4, 34, a)
    story.stage("kv transfer", 40, 50, a)
    story.step(56, 66, [a], {a: 4})
    story.ends(66, a)
    assert of(story, a) == {
        "ingress": 2,
        "hidden_queue": 2,
        "grammar": 30,
        "kv_transfer": 10,
        "scheduler_queue": 12,
        "prefill": 10,
    }


def test_media_are_fetched_and_prepared_inside_of_what_is_tokenized() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 60, a)
    story.stage("fetch media", 4, 34, a)
    story.stage("fetch media", 4, 24, a)
    story.stage("prepare media", 40, 55, a)
    story.submitted(60, a)
    story.step(60, 66, [a], {a: 4})
    story.ends(66, a)
    assert of(story, a) == {"ingress": 2, "tokenize": 13, "media": 45, "prefill": 6}


def test_a_stage_that_the_application_named_is_its_own() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("database lookup", 1, 251, a)
    story.submitted(260, a)
    story.step(260, 270, [a], {a: 4})
    story.ends(270, a)
    assert of(story, a) == {"ingress": 1, "application": 250, "unexplained": 9, "prefill": 10}


def test_a_stage_inside_another_takes_its_time_from_it() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("outer", 0, 100, a)
    story.stage("tokenize", 40, 60, a)
    story.ends(100, a)
    assert of(story, a) == {"application": 80, "tokenize": 20}


# ── in the batch ─────────────────────────────────────────────────────────────────────────────────────────────────


def held_up(prompt: int) -> tuple[Story, Who, Who]:
    """One that decodes beside another whose prompt makes a step of 10 ms one of 90."""
    story = Story()
    at = warmed_up(story)
    victim = story.arrives(at, "victim")
    story.submitted(at, victim)
    offender = story.arrives(at + 1, "offender")
    story.submitted(at + 1, offender)
    story.step(at, at + 10, [victim], {victim: 4})
    story.step(at + 10, at + 20, [victim])
    until = at + 110 if prompt else at + 30
    story.step(
        at + 20, until, [victim, offender] if prompt else [victim], {offender: prompt} if prompt else None
    )
    story.step(until, until + 10, [victim])
    story.ends(until + 10, victim)
    story.ends(until + 10, offender)
    return story, victim, offender


def test_the_excess_of_a_step_with_anothers_prompt_is_interference_and_names_the_other() -> None:
    story, victim, offender = held_up(prompt=4000)
    assert of(story, victim) == {"prefill": 10, "decode": 30, "interference": 80}
    (record,) = [r for r in blamed(story.in_order()) if r.span_id == ids("victim")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.span_id == ids("offender")[1]
    assert record.breakdown.interferer.length == 80_000_000


def test_without_the_others_prompt_nothing_is_blamed_on_it() -> None:
    story, victim, _ = held_up(prompt=0)
    assert of(story, victim) == {"prefill": 10, "decode": 30}


def test_the_offender_is_linked_from_the_span_of_the_victim() -> None:
    story, _, _ = held_up(prompt=4000)
    (span,) = [
        s
        for s in exported(blamed(story.in_order()))
        if s["name"] == "chat toy" and s["span_id"] == ids("victim")[1].hex()
    ]
    assert span["attributes"]["infer.latency.interference"] == pytest.approx(0.08)
    assert span["attributes"]["infer.latency.top_cause"] == "interference"
    assert [link["span_id"] for link in span["links"]] == [ids("offender")[1].hex()]


def classes(story: Story, who: Who) -> dict[str, float]:
    """ms of its interference, by class of who caused it."""
    (record,) = [record for record in blamed(story.in_order()) if record.span_id == ids(who.name)[1]]
    assert record.breakdown is not None
    return {named: length / 1e6 for named, length in record.breakdown.interference_by_class}


def test_interference_is_of_the_size_of_the_prompt_that_caused_it() -> None:
    story, victim, offender = held_up(prompt=4000)
    assert classes(story, victim) == {"long": 80}
    assert classes(story, offender) == {}
    story, victim, _ = held_up(prompt=300)
    assert classes(story, victim) == {"medium": 80}


def test_a_chunk_is_of_the_whole_prompt_if_that_was_said() -> None:
    story, victim, offender = held_up(prompt=300)
    story.said = [
        said._replace(event=said.event._replace(input_tokens=5000))
        if said.handle == offender.handle and isinstance(said.event, events.RequestSubmitted)
        else said
        for said in story.said
    ]
    assert classes(story, victim) == {"long": 80}


def test_interference_is_of_the_traffic_class_where_one_was_said() -> None:
    story, victim, offender = held_up(prompt=4000)
    arrived = next(s.event.at for s in story.said if s.handle == offender.handle)
    story.state(offender, events.AttributeSet(arrived, semconv.TRAFFIC_CLASS, "batch"))
    assert classes(story, victim) == {"batch": 80}
    (span,) = [s for s in exported(blamed(story.in_order())) if s["span_id"] == ids("victim")[1].hex()]
    (link,) = span["links"]
    assert link["attributes"] == {"infer.interference.delay": 0.08, "infer.interference.class": "batch"}


def test_offenders_of_two_classes_share_interference_by_their_tokens() -> None:
    story = Story()
    at = warmed_up(story)
    victim, small, large = (story.arrives(at, name) for name in ("victim", "small", "large"))
    story.step(at, at + 10, [victim], {victim: 4})
    story.step(at + 10, at + 110, [victim, small, large], {small: 100, large: 300})
    story.step(at + 110, at + 120, [victim])
    for who in (victim, small, large):
        story.ends(at + 120, who)
    assert classes(story, victim) == {"short": 22.5, "medium": 67.5}


def test_two_prompts_in_one_step_share_it_by_their_tokens() -> None:
    story = Story()
    at = warmed_up(story)
    small, large = story.arrives(at, "small"), story.arrives(at, "large")
    story.submitted(at, small)
    story.submitted(at, large)
    story.step(at, at + 100, [small, large], {small: 100, large: 300})
    story.ends(at + 100, small)
    story.ends(at + 100, large)
    assert of(story, small) == {"prefill": 25, "interference": 75}
    assert of(story, large) == {"prefill": 75, "interference": 25}


def test_what_a_bigger_batch_adds_to_each_step_is_batching() -> None:
    story = Story()
    crowd = [story.arrives(0, f"one of many {i}") for i in range(20)]
    at = 0.0
    for step in range(80):  # 5 ms and 1 ms for each sequence
        members = crowd[: 2 + step % 10]
        length = 5 + len(members)
        story.step(at, at + length, members)
        at += length
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a, *crowd[:9]], {a: 4})
    story.step(at + 10, at + 25, [a, *crowd[:9]])
    story.ends(at + 25, a)
    said = of(story, a)
    assert said["batching"] == pytest.approx(9 + 9, abs=0.1)
    assert said["decode"] == pytest.approx(6, abs=0.1)


@pytest.mark.parametrize("outcome", [events.OK, events.ABORTED])
def test_a_generation_that_was_told_as_one_is_its_own_work_however_it_ends(outcome: int) -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(0, a, input_tokens=5)
    story.stage("decode", 10, 200, a, items=12)
    story.ends(200, a, outcome)
    causes = of(story, a)
    assert causes.pop("decode") == 190
    assert sum(causes.values()) == 10, "what was before it"


def test_a_step_that_nothing_explains_is_unexplained() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 300, [a])
    story.ends(at + 300, a)
    assert of(story, a) == {"prefill": 10, "decode": 10, "unexplained": 280}


def test_time_between_steps_is_the_hosts() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    for i in range(3):
        story.step(25 + 25 * i, 35 + 25 * i, [a])
    story.ends(85, a)
    assert of(story, a) == {"prefill": 10, "decode": 30, "host_bubble": 45}


# ── what a device says of steps ──────────────────────────────────────────────────────────────────────────────────


def alone_on_a_device(story: Story, *spans: tuple[float, float], queued: float = 0) -> Who:
    """A stream of steps of 10 ms, back to back, after warming up; from the third on the device is at them as told, in ms of each."""
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    story.step(at + 10, at + 20, [a])
    for i, (since, until) in enumerate(spans, 2):
        step = story.step(at + 10 * i, at + 10 * i + 10, [a])
        if since < until:
            story.timed(step, at + 10 * i + since, at + 10 * i + until, queued=queued)
    story.ends(at + 10 * (len(spans) + 2), a)
    return a


def test_what_a_device_had_nothing_to_do_in_is_the_hosts() -> None:
    story = Story()
    a = alone_on_a_device(story, (3, 9), (3, 9), (3, 9))
    assert of(story, a) == {"prefill": 10, "host_bubble": 16, "decode": 24}


def test_steps_that_were_not_timed_are_as_those_that_were() -> None:
    story = Story()
    a = alone_on_a_device(story, (0, 0), (3, 9), (0, 0))
    assert of(story, a) == {"prefill": 10, "host_bubble": 16, "decode": 24}


def test_a_device_that_is_behind_waited_for_nobody() -> None:
    story = Story()
    a = alone_on_a_device(story, (3, 10), (3, 10), queued=5)
    assert of(story, a) == {"prefill": 10, "decode": 30}


def test_before_a_step_that_is_launched_ahead_the_device_is_not_idle() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    second = story.scheduled(at + 10, [a])
    third = story.scheduled(at + 12, [a])
    story.done(at + 20, second)
    story.timed(second, at + 10, at + 15)
    story.done(at + 30, third)
    story.timed(third, at + 15, at + 30)
    story.ends(at + 30, a)
    assert of(story, a) == {"prefill": 10, "decode": 20}


@pytest.mark.parametrize(
    ("collected", "blamed"), [(0, {"host_bubble": 60}), (50, {"gc": 50, "host_bubble": 10})]
)
def test_a_stall_while_the_device_is_idle_is_the_hosts_but_for_what_is_known_of_it(
    collected: float, blamed: dict[str, float]
) -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    story.timed(story.step(at + 10, at + 20, [a]), at + 10, at + 20)
    story.timed(story.step(at + 20, at + 90, [a]), at + 80, at + 90)
    if collected:
        story.paused(at + 25, at + 25 + collected)
    story.ends(at + 90, a)
    assert of(story, a) == {"prefill": 10, "decode": 20, **blamed}


@pytest.mark.parametrize(("device", "cause"), [((20, 90), "gpu_throttled"), (None, "unexplained")])
def test_what_a_device_took_longer_while_its_clocks_were_held_down_is_theirs(
    device: tuple[float, float] | None, cause: str
) -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    story.step(at + 10, at + 20, [a])
    step = story.step(at + 20, at + 90, [a])
    if device is not None:
        story.timed(step, at + device[0], at + device[1])
    story.step(at + 90, at + 100, [a])
    story.ends(at + 100, a)
    (record,) = [one for one in story.records() if one.span_id == ids(a.name)[1]]
    record.gpu_throttled_at = ((ns(at + 80), ns(at + 5080)),)
    request.attribute_latency([record])
    assert record.breakdown is not None
    assert {why: length / 1e6 for why, length in record.breakdown.causes.items()} == {
        "prefill": 10, "decode": 30, cause: 60,
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    ticks(most=60),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(-5, 30), st.integers(-5, 30), st.integers(0, 1)), min_size=1, max_size=20),
)
def test_the_causes_sum_to_the_duration_whatever_a_device_says(
    program: list[Tick], depth: int, device: list[tuple[int, int, int]]
) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    said = list(simulator.said)
    seen = {one.ring: one.event for one in said if isinstance(one.event, events.EngineSeen)}
    for one in simulator.said:
        if isinstance(one.event, events.StepDone) and one.ring in seen:
            since, length, behind = device[one.event.step % len(device)]
            engine, began = seen[one.ring], one.event.at + since * 100_000
            times = (
                began + max(length, 0) * 100_000,
                began,
                engine.engine,
                engine.pid,
                0,
                one.event.step,
                engine.log,
            )
            said.append(
                events.RecordedEvent(
                    engine.process, 0, events.StepTimed(*times, 0, behind * 50_000, events.UNKNOWN_NS, 0)
                )
            )
    records = blamed(sorted(said, key=lambda one: one.event.at))
    for record in records:
        record.gpu_throttled_at = ((record.arrived_at, record.ended_at),)
        request.attribute_latency([record])
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        assert all(length > 0 for length in record.breakdown.causes.values())


# ── what interrupts ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_preemption_is_to_blame_for_the_wait_and_for_what_is_computed_again() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.step(at, at + 10, [a, b], {a: 4, b: 4})
    story.preempted(at + 12, a, "recompute")
    for i in range(5):
        story.step(at + 10 + 10 * i, at + 20 + 10 * i, [b])
    story.step(at + 60, at + 90, [b, a], {a: 5})
    story.ends(at + 90, a)
    assert of(story, a) == {"prefill": 5, "interference": 5, "preemption": 70, "decode": 10}


def test_a_preemption_while_a_step_is_in_flight_is_to_blame_for_the_same() -> None:
    """Asynchronous scheduling: the next step is composed, and somebody put back for it, before the last one is over."""
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.step(at, at + 10, [a, b], {a: 4, b: 4})
    in_flight = story.scheduled(at + 10, [a, b])
    story.preempted(at + 11, a, "recompute")
    next_one = story.scheduled(at + 11, [b])
    story.done(at + 20, in_flight)
    story.done(at + 30, next_one)
    for i in range(4):
        story.step(at + 30 + 10 * i, at + 40 + 10 * i, [b])
    story.step(at + 70, at + 100, [b, a], {a: 5})
    story.ends(at + 100, a)
    said = of(story, a)
    assert said == {"prefill": 5, "interference": 5, "decode": 20, "preemption": 70}


def test_prompts_of_a_requests_own_other_sequences_are_prefill_and_nobody_elses_fault() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.submitted(at, a, sequences=2)
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 20, [a])
    story.step(at + 20, at + 320, [a, a], tokens={1: 3000})
    story.step(at + 320, at + 330, [a, a])
    story.step(at + 330, at + 640, [a, a, b], {b: 100}, tokens={1: 200, 2: 100})
    story.ends(at + 640, a)
    said = of(story, a)
    assert said["prefill"] == pytest.approx(10 + 290, abs=5)
    assert "unexplained" not in said


def test_accepted_drafts_are_not_sequences() -> None:
    story = Story()
    crowd, fast = [story.arrives(0, f"c{i}") for i in range(7)], story.arrives(0, "fast")
    story.step(0, 50, [*crowd, fast], {fast: 4})
    for n in range(1, 5):
        story.step(50 * n, 50 * n + 50, [*crowd, fast], delivered={fast: 4})
    story.ends(250, fast)
    record = story.record(fast)
    record.cost_model = StepCostModel(10e6, 5e6, 0.0, 100)
    request.attribute_latency([record])
    assert record.breakdown is not None
    said = {cause: length / 1e6 for cause, length in record.breakdown.causes.items()}
    assert (said["decode"], said["batching"]) == (
        4 * 15,
        35 + 4 * 35,
    )  # of others, before its first token and after


def test_what_is_known_by_steps_of_one_engine_is_not_looked_up_in_another() -> None:
    story = Story()
    at = warmed_up(story)
    other = story.engine(11)
    a, innocent = story.arrives(at, "a"), story.arrives(at, "innocent")
    for n in range(60):
        story.step(at + n, at + n + 1, [innocent], {innocent: 500} if n == 41 else None, engine=other)
    story.submitted(at, a, sequences=2)
    story.step(at + 60, at + 70, [a], {a: 4})
    story.step(at + 60, at + 70, [innocent, a], {a: 4}, engine=other)
    for n in range(7, 10):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
        story.step(at + 10 * n, at + 10 * n + 10, [innocent, a], engine=other)
    story.ends(at + 100, a)
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("a")[1]]
    assert record.is_multi_engine
    assert record.breakdown is not None and record.breakdown.interferer is None
    assert sum(record.breakdown.causes.values()) == record.duration_ns


def test_who_is_put_back_while_its_first_token_is_on_its_way_is_put_back_all_the_same() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    first = story.scheduled(at, [b, a], {a: 40})
    story.preempted(at + 5, a, "recompute")
    story.done(at + 50, first)
    for i in range(8):
        story.step(at + 50 + 10 * i, at + 60 + 10 * i, [b])
    story.step(at + 130, at + 180, [b, a], {a: 41})
    story.ends(at + 180, a)
    said = of(story, a)
    assert said["preemption"] == 80 + 40
    assert said.get("interference", 0) < 2


def test_a_prompt_of_which_the_cache_had_some_is_computed_again_as_far_as_it_was() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.submitted(at, a, input_tokens=10_000)
    story.state(a, events.PrefixRead(ns(at), 10_000, 8_000))
    story.step(at, at + 100, [a], {a: 1000}, delivered={a: 0})
    story.preempted(at + 110, a, "recompute")
    story.step(at + 800, at + 900, [a], {a: 1000}, delivered={a: 0})
    story.step(at + 900, at + 1000, [a], {a: 1000})
    story.ends(at + 1000, a)
    said = of(story, a)
    assert (said["preemption"], said["prefill"]) == (700 + 100, 200)


def test_a_prompt_that_is_put_back_waits_for_room_and_computes_again_what_it_had() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.submitted(at, a, input_tokens=80)
    story.step(at, at + 10, [b, a], {b: 1, a: 40}, delivered={a: 0})
    story.preempted(at + 12, a, "recompute")
    for i in range(1, 9):
        story.step(at + 10 * i, at + 10 * i + 10, [b])
    story.step(at + 90, at + 170, [b, a], {a: 80})
    story.step(at + 170, at + 180, [b, a])
    story.ends(at + 180, a)
    said = of(story, a)
    assert said["preemption"] == pytest.approx(80 + 40, abs=1)
    assert said["prefill"] == pytest.approx(10 + 40, abs=1)
    assert said["decode"] == 10
    assert said.get("interference", 0) < 1


# ── two in flight ────────────────────────────────────────────────────────────────────────────────────────────────


def behind(prompt: int, length: float) -> tuple[Story, Who, Who]:
    """One whose prompt of 20 ms is scheduled while a step with so many tokens of another's is in flight, 2 ms after its begin."""
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    for who in (a, b):
        story.submitted(at, who)
    others = story.scheduled(at, [b], {b: prompt})
    own = story.scheduled(at + 2, [b, a], {a: 50})
    story.done(at + length, others)
    story.done(at + length + 20, own)
    for who in (a, b):
        story.ends(at + length + 20, who)
    return story, a, b


def test_a_prompt_behind_anothers_in_the_step_before_is_not_slow_itself() -> None:
    story, a, b = behind(prompt=4000, length=400)
    assert of(story, a) == {"scheduler_queue": 2, "batching": 10, "interference": 388, "prefill": 20}
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert (record.breakdown.interferer.span_id, record.breakdown.interferer.length) == (
        ids(b.name)[1],
        388 * MS,
    )


def test_a_few_tokens_in_the_step_before_are_not_to_blame_for_all_of_it() -> None:
    story, a, _ = behind(prompt=2, length=11)
    assert of(story, a) == {"scheduler_queue": 2, "batching": 9, "prefill": 20}


def test_a_prompt_behind_a_step_without_prompts_waits_for_the_batch() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.step(at, at + 10, [b], {b: 4})
    without = story.scheduled(at + 10, [b])
    own = story.scheduled(at + 12, [b, a], {a: 50})
    story.done(at + 20, without)
    story.done(at + 40, own)
    story.ends(at + 40, a)
    assert of(story, a) == {"ingress": 12, "batching": 8, "prefill": 20}


def test_who_shares_a_chunk_with_a_few_tokens_is_not_named_for_the_chunk() -> None:
    story = Story()
    at = warmed_up(story)
    victim, small, large = (story.arrives(at, name) for name in ("victim", "small", "large"))
    story.step(at, at + 400, [victim, small], {victim: 3900, small: 100})
    story.step(at + 400, at + 410, [victim, small])
    story.step(at + 410, at + 540, [victim, small, large], {large: 1200})
    for who in (victim, small, large):
        story.ends(at + 540, who)
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("victim")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.span_id == ids("large")[1]
    assert record.breakdown.causes["interference"] == (10 + 120) * MS


# ── for once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_slow_step_with_a_batch_of_a_size_is_a_first_use_and_the_second_is_unexplained() -> None:
    story = Story()
    at = warmed_up(story)
    crowd = [story.arrives(at, f"one of many {i}") for i in range(5)]
    for who in crowd:  # one by one, so that the batch has grown when nobody has a prompt
        story.step(at, at + 10, [who], {who: 1})
        at += 10
    story.step(at, at + 310, crowd)
    story.step(at + 310, at + 620, crowd)
    for who in crowd:
        story.ends(at + 620, who)
    said = of(story, crowd[4])
    assert said["warmup"] == 300
    assert said["unexplained"] == 300


def test_the_first_prompt_of_an_engine_takes_long_for_once() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(0, a)
    story.step(0, 2000, [a], {a: 4})
    for i in range(30):
        story.step(2000 + 10 * i, 2010 + 10 * i, [a])
    story.ends(2300, a)
    assert of(story, a) == {"prefill": 50, "warmup": 1950, "decode": 300}


def test_others_are_not_to_blame_for_what_the_first_use_of_a_prompt_adds() -> None:
    story = Story()
    at = warmed_up(story)
    victim, other = story.arrives(at, "victim"), story.arrives(at, "other")
    story.step(at, at + 10, [victim], {victim: 1})
    story.step(at + 10, at + 1020, [victim, other], {other: 16})
    story.step(at + 1020, at + 1030, [victim, other])
    story.ends(at + 1030, victim)
    story.ends(at + 1030, other)
    assert of(story, victim) == {"prefill": 10, "decode": 20, "interference": 160, "warmup": 840}


def test_where_the_engines_beginning_was_not_seen_nothing_is_a_first_use() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 2000, [a], {a: 4})
    for i in range(30):
        story.step(2000 + 10 * i, 2010 + 10 * i, [a])
    story.ends(2300, a)
    story.said = [said for said in story.said if getattr(said.event, "step", 0) != 1]
    assert "warmup" not in of(story, a)


# ── what stops everything ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("length", "said"), [(50, {"gc": 50}), (0, {})])
def test_a_garbage_collection_takes_its_time_from_the_step_it_fell_into(
    length: int, said: dict[str, int]
) -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 20 + length, [a])
    story.paused(at + 12, at + 12 + length)
    story.ends(at + 20 + length, a)
    assert of(story, a) == {"prefill": 10, "decode": 10, **said}


def test_pauses_that_overlap_are_counted_once() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 70, [a])
    story.paused(at + 12, at + 62)
    story.paused(at + 22, at + 52, "throttled")
    story.ends(at + 70, a)
    said = of(story, a)
    assert said["gc"] + said.get("throttled", 0) == 50
    assert said["decode"] == 10


def test_a_capture_inside_a_compilation_is_told_of_as_a_capture() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 70, [a])
    story.paused(at + 12, at + 62, "compile")
    story.paused(at + 32, at + 52, "capture")
    story.ends(at + 70, a)
    assert of(story, a) == {"prefill": 10, "decode": 10, "compile": 30, "capture": 20}


def test_what_was_while_streaming_is_known_apart_from_what_was_before() -> None:
    story, _, _ = held_up(prompt=4000)
    arrived = 400
    story.paused(arrived + 2, arrived + 6)
    story.paused(arrived + 12, arrived + 17)
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("victim")[1]]
    assert record.breakdown is not None
    assert record.breakdown.causes["gc"] == (4 + 5) * MS
    streaming = {cause: length for cause, length in record.breakdown.streaming.items() if length}
    assert streaming == {"gc": 5 * MS, "decode": 25 * MS, "interference": 80 * MS}


def test_a_quota_that_was_used_up_outside_of_the_engines_steps_is_to_blame_there_too() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.stage("tokenize", at, at + 400, a)
    story.submitted(at + 400, a)
    story.step(at + 500, at + 510, [a], {a: 4})
    story.step(at + 510, at + 520, [a])
    story.paused(at + 50, at + 370, "throttled")
    story.paused(at + 410, at + 490, "throttled")
    story.ends(at + 520, a)
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("a")[1]]
    record.thread_delays = ThreadDelays()  # the kernel tells of the engine's thread
    request.attribute_latency([record])
    assert record.breakdown is not None
    assert {cause: length / 1e6 for cause, length in record.breakdown.causes.items()} == {
        "tokenize": 80,
        "throttled": 400,
        "scheduler_queue": 20,
        "prefill": 10,
        "decode": 10,
    }


def blocked(story: Story, device: tuple[float, float] | None) -> dict[str, float]:
    """A step of 80 ms where 10 are usual, in which its thread slept; the device was at it as told."""
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    story.step(at + 10, at + 20, [a])
    step = story.step(at + 20, at + 100, [a])
    if device is not None:
        story.timed(step, at + device[0], at + device[1])
    story.step(at + 100, at + 110, [a])
    story.ends(at + 110, a)
    record = story.record(a)
    strain = ThreadDelays()
    strain.add_sample(events.ThreadSeen(ns(at + 100), ns(at + 20), 10 * MS, 0, 0, 0))
    assert record.steps is not None and record.cost_model is not None
    table = np.array([[1, 2], [ns(at), ns(at + 20)], [ns(at + 20), ns(at + 100)], [1, 1], [1, 1], [0, 0]])
    strain.resolve_samples(table, record.cost_model, final=True)
    record.thread_delays, record.gpu_throttled_at = strain, ((ns(at + 20), ns(at + 100)),)
    request.attribute_latency([record])
    assert record.breakdown is not None
    return {cause: length / 1e6 for cause, length in record.breakdown.causes.items() if cause not in _ITS_OWN}


_ITS_OWN = ("prefill", "decode")


def test_a_thread_that_waits_for_a_device_at_work_is_not_kept_by_a_lock() -> None:
    assert blocked(Story(), device=None) == {"blocked": 70}
    assert blocked(Story(), device=(21, 100)) == {"blocked": 1, "gpu_throttled": 69, "host_bubble": 2}


# ── what stops the event loop alone ──────────────────────────────────────────────────────────────────────────────


def test_who_waits_on_the_way_in_while_the_event_loop_is_blocked_waits_for_the_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.submitted(180, a)
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert of(story, a) == {"ingress": 30, "event_loop": 150, "prefill": 10}


def test_who_went_on_before_the_loop_did_was_not_waiting_for_it() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.submitted(160, a)  # from the call that blocks the loop, or from another thread
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert of(story, a) == {"ingress": 160, "scheduler_queue": 20, "prefill": 10}


def test_what_is_sent_late_since_the_event_loop_is_blocked_waits_for_the_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    story.step(10, 20, [a])
    story.paused(15, 215, "event_loop")
    story.ends(220, a, chunks=1, detokenize=2)
    assert of(story, a) == {"prefill": 10, "decode": 10, "event_loop": 195, "detokenize": 2, "egress": 3}


def test_the_engine_goes_on_while_the_event_loop_is_blocked() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.submitted(at, a)
    story.step(at + 5, at + 15, [a], {a: 3})
    story.step(at + 15, at + 25, [a], {a: 1})
    for i in range(4):
        story.step(at + 25 + 10 * i, at + 35 + 10 * i, [a])
    story.paused(at + 1, at + 55, "event_loop")
    story.ends(at + 65, a)
    said = of(story, a)
    assert "event_loop" not in said
    assert said["scheduler_queue"] == 5
    assert said["decode"] + said["prefill"] == 60


def test_a_stage_that_awaits_waits_for_the_loop_and_one_that_blocks_it_is_itself() -> None:
    story = Story()
    culprit, victim = story.arrives(0, "culprit"), story.arrives(0, "victim")
    story.stage("retrieval", 10, 210, culprit)
    story.stage("retrieval", 5, 220, victim)
    story.paused(40, 211, "event_loop")
    story.ends(215, culprit)
    story.ends(225, victim)
    assert of(story, culprit) == {"ingress": 10, "application": 200, "event_loop": 1, "unexplained": 4}
    assert of(story, victim) == {"ingress": 5, "application": 44, "event_loop": 171, "unexplained": 5}


def test_a_call_in_one_piece_does_not_wait_for_the_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 5, 205, a)
    story.paused(40, 160, "event_loop")
    story.ends(210, a)
    assert of(story, a) == {"ingress": 5, "tokenize": 200, "unexplained": 5}


def test_of_a_loop_that_a_collection_holds_up_the_collection_is_told() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(30, 130)
    story.paused(50, 170, "event_loop")
    story.submitted(180, a)
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert of(story, a) == {"ingress": 40, "gc": 100, "event_loop": 40, "prefill": 10}


def test_a_request_that_no_engine_sees_waits_for_the_loop_as_well() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.ends(180, a)
    assert of(story, a) == {"event_loop": 150, "unexplained": 30}


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_reader_is_egress_and_text_made_at_the_end_is_detokenize() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    story.step(10, 20, [a])
    story.ends(120, a, chunks=1, send_wait=90, detokenize=8)
    assert of(story, a) == {"prefill": 10, "decode": 10, "detokenize": 8, "egress": 92}


def test_one_that_is_aborted_while_it_waits_waited() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(5, a)
    story.aborts(500, a)
    assert of(story, a) == {"ingress": 5, "scheduler_queue": 495}


def test_a_stream_that_is_given_up_while_the_engine_hangs_did_not_do_its_own_work() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 20, [a])
    story.aborts(at + 20 + 6000, a)
    assert of(story, a) == {"prefill": 10, "decode": 20, "unexplained": 5990}


def twice(story: Story, at: float) -> Who:
    """A request that generates, looks something up for 2 s, and generates again behind a prompt of two steps; meanwhile, another."""
    a, b = story.arrives(at, "a"), story.arrives(at + 999, "b")
    story.submitted(at, a, input_tokens=40)
    story.step(at, at + 10, [a], {a: 40})
    for n in range(1, 6):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    story.finished(at + 60, a)
    story.stage("search", at + 62, at + 2060, a)
    story.step(at + 1000, at + 1010, [b], {b: 4})
    story.ends(at + 1010, b)
    story.submitted(at + 2060, a, input_tokens=4000)
    story.step(at + 2080, at + 2100, [a], {a: 2000}, delivered={a: 0})
    story.step(at + 2100, at + 2120, [a], {a: 2000})
    for n in range(4):
        story.step(at + 2120 + 10 * n, at + 2130 + 10 * n, [a])
    story.finished(at + 2160, a)
    story.ends(at + 2160, a)
    return a


def test_between_two_generations_of_a_request_the_time_is_the_applications_and_no_gap_between_tokens() -> (
    None
):
    story = Story()
    a = twice(story, warmed_up(story))
    said = of(story, a)
    assert said == {
        "application": 2000,
        "scheduler_queue": 20,
        "prefill": pytest.approx(10 + 20 + 10, abs=1),
        "decode": pytest.approx(100, abs=1),
    }
    record = story.record(a)
    assert record.summary.gap_max == 10 * MS
    assert record.decode_ns == (5 + 4) * 10 * MS
    assert record.output_tokens == 6 + 5
    assert record.tokens_after_first == 5 + 4


def test_what_others_do_between_two_generations_of_a_request_is_no_interference() -> None:
    story = Story()
    at = warmed_up(story)
    other = story.arrives(at, "other")
    story.step(at, at + 10, [other], {other: 4})
    at += 10
    a = story.arrives(at, "a")
    story.submitted(at, a)
    story.step(at, at + 10, [other, a], {a: 4})
    story.finished(at + 10, a)
    for n in range(1, 30):
        story.step(at + 10 * n, at + 10 * n + 10, [other])
    story.submitted(at + 295, a)
    story.step(at + 300, at + 310, [other, a], {a: 4})
    story.step(at + 310, at + 320, [other, a])
    story.finished(at + 320, a)
    story.ends(at + 320, a)
    said = of(story, a)
    assert said["application"] == 285
    assert said["scheduler_queue"] == 5
    assert "interference" not in said


def test_an_agent_whose_calls_overlap_is_at_the_engine_all_the_time() -> None:
    """Two calls; while one goes on the other is over, and a third is made."""
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.submitted(at, a, sequences=2)
    story.step(at, at + 10, [a, a], tokens={0: 4, 1: 4})
    story.step(at + 10, at + 20, [a, a])
    story.finished(at + 20, a)
    story.step(at + 20, at + 30, [a])
    story.submitted(at + 35, a)
    story.step(at + 30, at + 40, [a])
    story.step(at + 40, at + 50, [a, a], tokens={1: 4})
    story.finished(at + 50, a)
    story.finished(at + 50, a)
    story.ends(at + 50, a)
    assert "application" not in of(story, a)
    assert story.record(a).generation_gaps == ()


def test_where_batches_take_turns_on_several_devices_each_step_is_a_requests_own() -> None:
    """Pipeline parallel: a step is done every 10 ms, and takes 20."""
    story = Story()
    first, second = story.arrives(0, "first"), story.arrives(0, "second")
    batches = [[first], [second]]
    begun = story.scheduled(0, batches[0], {first: 4})
    for n in range(1, 60):
        who = batches[n % 2]
        following = story.scheduled(10 * n + 1, who, {who[0]: 4} if n == 1 else None)
        story.done(10 * n + 10, begun)
        begun = following
    story.ends(600, first)
    story.ends(600, second)
    said = of(story, first)
    assert said["decode"] > 550
    assert said.get("unexplained", 0) + said.get("interference", 0) + said.get("host_bubble", 0) < 30


# ── who did not wait for the end ─────────────────────────────────────────────────────────────────────────────────


def test_who_leaves_while_anothers_prompt_is_computed_was_held_up_by_that() -> None:
    story = Story()
    at = warmed_up(story)
    a, heavy = story.arrives(at, "a"), story.arrives(at, "heavy")
    story.step(at, at + 6000, [a, heavy], {a: 10, heavy: 99990})
    story.aborts(at + 5000, a)
    story.ends(at + 6000, heavy)
    said = of(story, a)
    assert said["interference"] > 4950 and said["prefill"] < 50
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.trace_id == ids("heavy")[0]
    assert record.prefill_steps == [], "it did not see the end of it"


def test_who_leaves_its_stream_while_anothers_prompt_is_computed_was_held_up_by_that() -> None:
    story = Story()
    at = warmed_up(story)
    a, heavy = story.arrives(at, "a"), story.arrives(at, "heavy")
    story.step(at, at + 10, [a], {a: 4})
    for n in range(1, 4):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    story.step(at + 40, at + 6040, [a, heavy], {heavy: 99990})
    story.aborts(at + 5040, a)
    story.ends(at + 6040, heavy)
    assert of(story, a) == {
        "prefill": 10,
        "decode": pytest.approx(40, abs=1),
        "interference": pytest.approx(4990, abs=1),
    }
    (record,) = [one for one in blamed(story.in_order()) if one.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.stalled_by is not None
    assert record.breakdown.stalled_by.trace_id == ids("heavy")[0]


@pytest.mark.parametrize("steps", [0, 3])
def test_who_leaves_before_it_is_its_turn_again_was_preempted_all_the_while(steps: int) -> None:
    story = Story()
    at = warmed_up(story)
    a, other = story.arrives(at, "a"), story.arrives(at, "other")
    story.step(at, at + 10, [a, other], {a: 100, other: 4}, delivered={a: 1 if steps else 0})
    at += 10
    for _ in range(steps):
        story.step(at, at + 10, [a, other])
        at += 10
    story.preempted(at, a, "recompute")
    for n in range(200):
        story.step(at + 100 * n, at + 100 * n + 100, [other])
    story.aborts(at + 20_000, a)
    story.ends(at + 20_000, other)
    said = of(story, a)
    assert said["preemption"] == pytest.approx(20_000, abs=1)
    assert sum(said.values()) == pytest.approx(20_010 + 10 * steps)


def test_one_of_two_sequences_that_is_computed_again_is_the_preemptions() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.submitted(at, a, sequences=2, input_tokens=100)
    story.step(at, at + 10, [a, a], tokens={0: 50, 1: 50})
    story.step(at + 10, at + 20, [a, a])
    story.preempted(at + 20, a, "recompute")
    at += 20
    for n in range(20):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    at += 200
    story.step(at, at + 400, [a, a], tokens={1: 52})
    story.step(at + 400, at + 410, [a, a])
    story.ends(at + 410, a)
    said = of(story, a)
    assert said["preemption"] == pytest.approx(400, abs=11)
    assert said["prefill"] == pytest.approx(10, abs=1)


def test_more_prompts_in_one_request_than_are_remembered_are_all_there_at_once() -> None:
    story = Story()
    a = story.arrives(0, "a")
    for _ in range(600):
        story.submitted(0, a)
    story.step(0, 10, [a] * 600, tokens=dict.fromkeys(range(600), 4))
    for n in range(1, 11):
        story.step(10 * n, 10 * n + 10, [a] * 600)
    story.ends(110, a)
    assert story.record(a).tokens_after_first == 10


def test_steps_of_two_engines_are_not_held_against_what_those_of_one_cost() -> None:
    story = Story()
    slow = story.engine(ring=11)
    early, later = story.arrives(0, "early", http=False), story.arrives(0, "later", http=False)
    for n in range(60):
        story.step(30 * n, 30 * n + 30, [early], engine=slow)
        story.step(30 * n, 30 * n + 3, [later])
    story.ends(1800, early)
    story.ends(1800, later)
    at = 1800
    a = story.arrives(at, "a")
    story.submitted(at, a)
    story.step(at, at + 30, [a], {a: 4}, engine=slow)
    for n in range(1, 30):
        story.step(at + 30 * n, at + 30 * n + 30, [a], engine=slow)
    at += 900
    story.step(at, at + 3, [])
    for n in range(30):
        story.step(at + 3 * n, at + 3 * n + 3, [a])
    story.ends(at + 90, a)
    assert of(story, a) == {"prefill": 30, "decode": 960}


def test_of_many_pauses_each_instant_is_given_away_once() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    for n in range(1, 400):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    for n in range(400):
        story.paused(at + 10 * n + 2, at + 10 * n + 4, "gc")
        story.paused(at + 10 * n + 3, at + 10 * n + 5, semconv.CAUSE_CAPTURE)
        story.paused(at + 10 * n + 1, at + 10 * n + 6, "throttled")
    story.ends(at + 4000, a)
    said = of(story, a)
    assert said["gc"] == pytest.approx(800)
    assert said["throttled"] == pytest.approx(800)
    assert sum(said.values()) == 4000
