"""Latency attribution: each ns of a request is assigned to exactly one cause."""

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
from tests.unit.assembly.test_assembler import ENGINES, any_event, plausible


def attributed_records(recorded: Any) -> list[RequestRecord]:
    assembler = Assembler()
    assembler.feed_events(recorded)
    records = assembler.drain_records(LATER)
    request.attribute_latency(records)
    return records


def causes_ms(story: Story, target: Who) -> dict[str, float]:
    """Returns the latency breakdown of a request: ms by cause."""
    (record,) = [
        record for record in attributed_records(story.in_order()) if record.span_id == ids(target.name)[1]
    ]
    assert record.breakdown is not None
    assert sum(record.breakdown.causes.values()) == record.duration_ns
    return {cause: length / 1e6 for cause, length in record.breakdown.causes.items()}


def warmed_up(story: Story, steps: int = 40, length: float = 10) -> float:
    """Runs steps of 10 ms each, whatever the batch, until the cost model is fitted. Returns the time of the end in ms."""
    early = story.arrives(0, "early", http=False)
    for i in range(steps):
        story.step(i * length, (i + 1) * length, [early])
    story.ends(steps * length, early)
    return steps * length


# ── arbitrary events ─────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(any_event, max_size=60), plausible()))
def test_causes_sum_to_duration_for_any_events(recorded: list[events.RecordedEvent]) -> None:
    for record in attributed_records([*ENGINES, *recorded]):
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
def test_causes_sum_to_duration_for_any_schedule(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    for record in attributed_records(simulator.said):
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns


@settings(max_examples=60, deadline=None)
@given(ticks(most=60), st.integers(1, 2))
def test_attribution_is_the_same_in_batches_and_alone(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    together = attributed_records(simulator.said)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("otel_infer.assembly.assembler.STEPS_PER_BATCH", 1)
        patched.setattr("otel_infer.analysis.attribution.request.STEPS_PER_BATCH", 1)
        alone = attributed_records(simulator.said)
    assert [(record.breakdown, record.summary) for record in alone] == [
        (record.breakdown, record.summary) for record in together
    ]
    for record, other in zip(alone, together):
        assert (record.steps is None) == (other.steps is None)
        assert record.steps is None or other.steps is None or (record.steps.table == other.steps.table).all()


# ── before the engine ────────────────────────────────────────────────────────────────────────────────────────────


def test_hidden_queue_is_separate_from_scheduler_queue() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 5, a)
    story.submitted(6, a)
    story.received(36, a)
    story.step(56, 66, [a], {a: 4})
    story.step(66, 76, [a])
    story.ends(78, a, chunks=2)
    assert causes_ms(story, a) == {
        "ingress": 2,
        "tokenize": 3,
        "unexplained": 1,
        "hidden_queue": 30,
        "scheduler_queue": 20,
        "prefill": 10,
        "decode": 10,
        "egress": 2,
    }


def test_grammar_and_kv_transfer_are_not_scheduler_queue() -> None:
    """Both run while the request waits for the scheduler."""
    story = Story()
    a = story.arrives(0)
    story.submitted(2, a)
    story.received(6, a)
    story.stage("grammar", 4, 34, a)
    story.stage("kv transfer", 40, 50, a)
    story.step(56, 66, [a], {a: 4})
    story.ends(66, a)
    assert causes_ms(story, a) == {
        "ingress": 2,
        "hidden_queue": 2,
        "grammar": 30,
        "kv_transfer": 10,
        "scheduler_queue": 12,
        "prefill": 10,
    }


def test_media_time_is_taken_out_of_tokenize() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 60, a)
    story.stage("fetch media", 4, 34, a)
    story.stage("fetch media", 4, 24, a)
    story.stage("prepare media", 40, 55, a)
    story.submitted(60, a)
    story.step(60, 66, [a], {a: 4})
    story.ends(66, a)
    assert causes_ms(story, a) == {"ingress": 2, "tokenize": 13, "media": 45, "prefill": 6}


def test_application_stage_is_attributed_to_application() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("database lookup", 1, 251, a)
    story.submitted(260, a)
    story.step(260, 270, [a], {a: 4})
    story.ends(270, a)
    assert causes_ms(story, a) == {"ingress": 1, "application": 250, "unexplained": 9, "prefill": 10}


def test_nested_stage_takes_its_time_from_the_outer() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("outer", 0, 100, a)
    story.stage("tokenize", 40, 60, a)
    story.ends(100, a)
    assert causes_ms(story, a) == {"application": 80, "tokenize": 20}


# ── in the batch ─────────────────────────────────────────────────────────────────────────────────────────────────


def delayed_by_prompt(prompt: int) -> tuple[Story, Who, Who]:
    """A request decodes beside another, whose prompt extends a step from 10 ms to 90 ms. 0: without that prompt."""
    story = Story()
    at = warmed_up(story)
    delayed = story.arrives(at, "delayed")
    story.submitted(at, delayed)
    interferer = story.arrives(at + 1, "interferer")
    story.submitted(at + 1, interferer)
    story.step(at, at + 10, [delayed], {delayed: 4})
    story.step(at + 10, at + 20, [delayed])
    until = at + 110 if prompt else at + 30
    story.step(
        at + 20,
        until,
        [delayed, interferer] if prompt else [delayed],
        {interferer: prompt} if prompt else None,
    )
    story.step(until, until + 10, [delayed])
    story.ends(until + 10, delayed)
    story.ends(until + 10, interferer)
    return story, delayed, interferer


def test_excess_of_a_step_is_interference_with_interferer() -> None:
    story, delayed, interferer = delayed_by_prompt(prompt=4000)
    assert causes_ms(story, delayed) == {"prefill": 10, "decode": 30, "interference": 80}
    (record,) = [r for r in attributed_records(story.in_order()) if r.span_id == ids("delayed")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.span_id == ids("interferer")[1]
    assert record.breakdown.interferer.length == 80_000_000


def test_without_another_prompt_there_is_no_interference() -> None:
    story, delayed, _ = delayed_by_prompt(prompt=0)
    assert causes_ms(story, delayed) == {"prefill": 10, "decode": 30}


def test_delayed_span_links_to_the_interferer() -> None:
    story, _, _ = delayed_by_prompt(prompt=4000)
    (span,) = [
        s
        for s in exported(attributed_records(story.in_order()))
        if s["name"] == "chat toy" and s["span_id"] == ids("delayed")[1].hex()
    ]
    assert span["attributes"]["infer.latency.interference"] == pytest.approx(0.08)
    assert span["attributes"]["infer.latency.top_cause"] == "interference"
    assert [link["span_id"] for link in span["links"]] == [ids("interferer")[1].hex()]


def interference_by_class(story: Story, target: Who) -> dict[str, float]:
    """Returns the ms of interference by the class of the interferer."""
    (record,) = [
        record for record in attributed_records(story.in_order()) if record.span_id == ids(target.name)[1]
    ]
    assert record.breakdown is not None
    return {name: length / 1e6 for name, length in record.breakdown.interference_by_class}


def test_interference_class_is_the_prompt_size() -> None:
    story, delayed, interferer = delayed_by_prompt(prompt=4000)
    assert interference_by_class(story, delayed) == {"long": 80}
    assert interference_by_class(story, interferer) == {}
    story, delayed, _ = delayed_by_prompt(prompt=300)
    assert interference_by_class(story, delayed) == {"medium": 80}


def test_chunk_has_the_class_of_the_whole_prompt() -> None:
    """The total prompt length is known from the submission."""
    story, delayed, interferer = delayed_by_prompt(prompt=300)
    story.said = [
        recorded._replace(event=recorded.event._replace(input_tokens=5000))
        if recorded.handle == interferer.handle and isinstance(recorded.event, events.RequestSubmitted)
        else recorded
        for recorded in story.said
    ]
    assert interference_by_class(story, delayed) == {"long": 80}


def test_traffic_class_replaces_prompt_size_class() -> None:
    story, delayed, interferer = delayed_by_prompt(prompt=4000)
    arrived = next(s.event.at for s in story.said if s.handle == interferer.handle)
    story.state(interferer, events.AttributeSet(arrived, semconv.TRAFFIC_CLASS, "batch"))
    assert interference_by_class(story, delayed) == {"batch": 80}
    (span,) = [
        s for s in exported(attributed_records(story.in_order())) if s["span_id"] == ids("delayed")[1].hex()
    ]
    (link,) = span["links"]
    assert link["attributes"] == {"infer.interference.delay": 0.08, "infer.interference.class": "batch"}


def test_two_interferer_classes_share_interference_by_tokens() -> None:
    story = Story()
    at = warmed_up(story)
    delayed, small, large = (story.arrives(at, name) for name in ("delayed", "small", "large"))
    story.step(at, at + 10, [delayed], {delayed: 4})
    story.step(at + 10, at + 110, [delayed, small, large], {small: 100, large: 300})
    story.step(at + 110, at + 120, [delayed])
    for member in (delayed, small, large):
        story.ends(at + 120, member)
    assert interference_by_class(story, delayed) == {"short": 22.5, "medium": 67.5}


def test_two_prompts_share_a_step_by_tokens() -> None:
    story = Story()
    at = warmed_up(story)
    small, large = story.arrives(at, "small"), story.arrives(at, "large")
    story.submitted(at, small)
    story.submitted(at, large)
    story.step(at, at + 100, [small, large], {small: 100, large: 300})
    story.ends(at + 100, small)
    story.ends(at + 100, large)
    assert causes_ms(story, small) == {"prefill": 25, "interference": 75}
    assert causes_ms(story, large) == {"prefill": 75, "interference": 25}


def test_step_time_added_by_batch_size_is_batching() -> None:
    story = Story()
    crowd = [story.arrives(0, f"member {i}") for i in range(20)]
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
    causes = causes_ms(story, a)
    assert causes["batching"] == pytest.approx(9 + 9, abs=0.1)
    assert causes["decode"] == pytest.approx(6, abs=0.1)


@pytest.mark.parametrize("outcome", [events.OK, events.ABORTED])
def test_single_generation_stage_is_decode_for_any_outcome(outcome: int) -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(0, a, input_tokens=5)
    story.stage("decode", 10, 200, a, items=12)
    story.ends(200, a, outcome)
    causes = causes_ms(story, a)
    assert causes.pop("decode") == 190
    assert sum(causes.values()) == 10, "time before generation"


def test_slow_step_without_known_cause_is_unexplained() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 300, [a])
    story.ends(at + 300, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 10, "unexplained": 280}


def test_time_between_steps_is_host_bubble() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    for i in range(3):
        story.step(25 + 25 * i, 35 + 25 * i, [a])
    story.ends(85, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 30, "host_bubble": 45}


# ── device times of steps ────────────────────────────────────────────────────────────────────────────────────────


def alone_on_a_device(story: Story, *spans: tuple[float, float], queued: float = 0) -> Who:
    """A stream of steps of 10 ms, back to back, after warm-up. From the third step on, `spans` are the device's busy times, in ms of the step."""
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


def test_device_idle_time_is_host_bubble() -> None:
    story = Story()
    a = alone_on_a_device(story, (3, 9), (3, 9), (3, 9))
    assert causes_ms(story, a) == {"prefill": 10, "host_bubble": 16, "decode": 24}


def test_untimed_steps_get_the_timed_host_share() -> None:
    story = Story()
    a = alone_on_a_device(story, (0, 0), (3, 9), (0, 0))
    assert causes_ms(story, a) == {"prefill": 10, "host_bubble": 16, "decode": 24}


def test_backlogged_device_has_no_host_bubble() -> None:
    story = Story()
    a = alone_on_a_device(story, (3, 10), (3, 10), queued=5)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 30}


def test_device_is_not_idle_before_a_pipelined_step() -> None:
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
    assert causes_ms(story, a) == {"prefill": 10, "decode": 20}


@pytest.mark.parametrize(
    ("collected", "expected"), [(0, {"host_bubble": 60}), (50, {"gc": 50, "host_bubble": 10})]
)
def test_stall_of_an_idle_device_is_host_bubble(collected: float, expected: dict[str, float]) -> None:
    """Known pauses, such as a garbage collection, take their part of it."""
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, http=False)
    story.step(at, at + 10, [a])
    story.timed(story.step(at + 10, at + 20, [a]), at + 10, at + 20)
    story.timed(story.step(at + 20, at + 90, [a]), at + 80, at + 90)
    if collected:
        story.paused(at + 25, at + 25 + collected)
    story.ends(at + 90, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 20, **expected}


@pytest.mark.parametrize(("device", "expected"), [((20, 90), "gpu_throttled"), (None, "unexplained")])
def test_excess_while_clocks_are_throttled_is_gpu_throttled(
    device: tuple[float, float] | None, expected: str
) -> None:
    """Without device times, the excess stays unexplained."""
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
    (record,) = [record for record in story.records() if record.span_id == ids(a.name)[1]]
    record.gpu_throttled_at = ((ns(at + 80), ns(at + 5080)),)
    request.attribute_latency([record])
    assert record.breakdown is not None
    assert {cause: length / 1e6 for cause, length in record.breakdown.causes.items()} == {
        "prefill": 10, "decode": 30, expected: 60,
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    ticks(most=60),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(-5, 30), st.integers(-5, 30), st.integers(0, 1)), min_size=1, max_size=20),
)
def test_causes_sum_to_duration_for_any_device_times(
    program: list[Tick], depth: int, device: list[tuple[int, int, int]]
) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    recorded = list(simulator.said)
    seen = {item.ring: item.event for item in recorded if isinstance(item.event, events.EngineSeen)}
    for item in simulator.said:
        if isinstance(item.event, events.StepDone) and item.ring in seen:
            since, length, behind = device[item.event.step % len(device)]
            engine, began = seen[item.ring], item.event.at + since * 100_000
            times = (
                began + max(length, 0) * 100_000,
                began,
                engine.engine,
                engine.pid,
                0,
                item.event.step,
                engine.log,
            )
            recorded.append(
                events.RecordedEvent(
                    engine.process, 0, events.StepTimed(*times, 0, behind * 50_000, events.UNKNOWN_NS, 0)
                )
            )
    records = attributed_records(sorted(recorded, key=lambda item: item.event.at))
    for record in records:
        record.gpu_throttled_at = ((record.arrived_at, record.ended_at),)
        request.attribute_latency([record])
        assert record.breakdown is not None
        assert sum(record.breakdown.causes.values()) == record.duration_ns
        assert all(length > 0 for length in record.breakdown.causes.values())


# ── preemption ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_preemption_covers_the_wait_and_the_recomputation() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.step(at, at + 10, [a, b], {a: 4, b: 4})
    story.preempted(at + 12, a, "recompute")
    for i in range(5):
        story.step(at + 10 + 10 * i, at + 20 + 10 * i, [b])
    story.step(at + 60, at + 90, [b, a], {a: 5})
    story.ends(at + 90, a)
    assert causes_ms(story, a) == {"prefill": 5, "interference": 5, "preemption": 70, "decode": 10}


def test_preemption_during_a_step_in_flight_counts_equally() -> None:
    """Asynchronous scheduling: the next step is composed, and a request preempted for it, before the last step ends."""
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
    causes = causes_ms(story, a)
    assert causes == {"prefill": 5, "interference": 5, "decode": 20, "preemption": 70}


def test_prompts_of_own_sequences_are_prefill_not_interference() -> None:
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
    causes = causes_ms(story, a)
    assert causes["prefill"] == pytest.approx(10 + 290, abs=5)
    assert "unexplained" not in causes


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
    causes = {cause: length / 1e6 for cause, length in record.breakdown.causes.items()}
    assert (causes["decode"], causes["batching"]) == (
        4 * 15,
        35 + 4 * 35,
    )  # of other requests, before its first token and after


def test_steps_of_two_engines_are_not_mixed() -> None:
    story = Story()
    at = warmed_up(story)
    other = story.engine(11)
    a, bystander = story.arrives(at, "a"), story.arrives(at, "bystander")
    for n in range(60):
        story.step(at + n, at + n + 1, [bystander], {bystander: 500} if n == 41 else None, engine=other)
    story.submitted(at, a, sequences=2)
    story.step(at + 60, at + 70, [a], {a: 4})
    story.step(at + 60, at + 70, [bystander, a], {a: 4}, engine=other)
    for n in range(7, 10):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
        story.step(at + 10 * n, at + 10 * n + 10, [bystander, a], engine=other)
    story.ends(at + 100, a)
    (record,) = [record for record in attributed_records(story.in_order()) if record.span_id == ids("a")[1]]
    assert record.is_multi_engine
    assert record.breakdown is not None and record.breakdown.interferer is None
    assert sum(record.breakdown.causes.values()) == record.duration_ns


def test_preemption_before_the_first_token_arrives_is_counted() -> None:
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
    causes = causes_ms(story, a)
    assert causes["preemption"] == 80 + 40
    assert causes.get("interference", 0) < 2


def test_recomputation_excludes_the_cached_prefix() -> None:
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
    causes = causes_ms(story, a)
    assert (causes["preemption"], causes["prefill"]) == (700 + 100, 200)


def test_preempted_prompt_waits_and_recomputes_its_chunks() -> None:
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
    causes = causes_ms(story, a)
    assert causes["preemption"] == pytest.approx(80 + 40, abs=1)
    assert causes["prefill"] == pytest.approx(10 + 40, abs=1)
    assert causes["decode"] == 10
    assert causes.get("interference", 0) < 1


# ── two steps in flight ──────────────────────────────────────────────────────────────────────────────────────────


def prompt_behind_a_step(prompt: int, length: float) -> tuple[Story, Who, Who]:
    """A prompt of 20 ms is scheduled 2 ms after a step began that has `prompt` tokens of another request and lasts `length` ms."""
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    for member in (a, b):
        story.submitted(at, member)
    others = story.scheduled(at, [b], {b: prompt})
    own = story.scheduled(at + 2, [b, a], {a: 50})
    story.done(at + length, others)
    story.done(at + length + 20, own)
    for member in (a, b):
        story.ends(at + length + 20, member)
    return story, a, b


def test_prompt_behind_another_prompt_is_interference() -> None:
    story, a, b = prompt_behind_a_step(prompt=4000, length=400)
    assert causes_ms(story, a) == {"scheduler_queue": 2, "batching": 10, "interference": 388, "prefill": 20}
    (record,) = [record for record in attributed_records(story.in_order()) if record.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert (record.breakdown.interferer.span_id, record.breakdown.interferer.length) == (
        ids(b.name)[1],
        388 * MS,
    )


def test_few_prompt_tokens_ahead_are_not_interference() -> None:
    story, a, _ = prompt_behind_a_step(prompt=2, length=11)
    assert causes_ms(story, a) == {"scheduler_queue": 2, "batching": 9, "prefill": 20}


def test_prompt_behind_a_decode_step_is_batching() -> None:
    story = Story()
    at = warmed_up(story)
    a, b = story.arrives(at, "a"), story.arrives(at, "b")
    story.step(at, at + 10, [b], {b: 4})
    without = story.scheduled(at + 10, [b])
    own = story.scheduled(at + 12, [b, a], {a: 50})
    story.done(at + 20, without)
    story.done(at + 40, own)
    story.ends(at + 40, a)
    assert causes_ms(story, a) == {"ingress": 12, "batching": 8, "prefill": 20}


def test_small_chunk_is_not_the_interferer() -> None:
    story = Story()
    at = warmed_up(story)
    delayed, small, large = (story.arrives(at, name) for name in ("delayed", "small", "large"))
    story.step(at, at + 400, [delayed, small], {delayed: 3900, small: 100})
    story.step(at + 400, at + 410, [delayed, small])
    story.step(at + 410, at + 540, [delayed, small, large], {large: 1200})
    for member in (delayed, small, large):
        story.ends(at + 540, member)
    (record,) = [
        record for record in attributed_records(story.in_order()) if record.span_id == ids("delayed")[1]
    ]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.span_id == ids("large")[1]
    assert record.breakdown.causes["interference"] == (10 + 120) * MS


# ── first use ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_first_slow_step_per_batch_size_is_warmup() -> None:
    """The second slow step of that batch size is unexplained."""
    story = Story()
    at = warmed_up(story)
    crowd = [story.arrives(at, f"member {i}") for i in range(5)]
    for member in crowd:  # one by one, so that the last increase of the batch has no prompt
        story.step(at, at + 10, [member], {member: 1})
        at += 10
    story.step(at, at + 310, crowd)
    story.step(at + 310, at + 620, crowd)
    for member in crowd:
        story.ends(at + 620, member)
    causes = causes_ms(story, crowd[4])
    assert causes["warmup"] == 300
    assert causes["unexplained"] == 300


def test_first_prompt_of_an_engine_is_warmup() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(0, a)
    story.step(0, 2000, [a], {a: 4})
    for i in range(30):
        story.step(2000 + 10 * i, 2010 + 10 * i, [a])
    story.ends(2300, a)
    assert causes_ms(story, a) == {"prefill": 50, "warmup": 1950, "decode": 300}


def test_first_use_of_prompts_is_not_interference() -> None:
    story = Story()
    at = warmed_up(story)
    delayed, other = story.arrives(at, "delayed"), story.arrives(at, "other")
    story.step(at, at + 10, [delayed], {delayed: 1})
    story.step(at + 10, at + 1020, [delayed, other], {other: 16})
    story.step(at + 1020, at + 1030, [delayed, other])
    story.ends(at + 1030, delayed)
    story.ends(at + 1030, other)
    assert causes_ms(story, delayed) == {"prefill": 10, "decode": 20, "interference": 160, "warmup": 840}


def test_without_the_first_step_there_is_no_warmup() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 2000, [a], {a: 4})
    for i in range(30):
        story.step(2000 + 10 * i, 2010 + 10 * i, [a])
    story.ends(2300, a)
    story.said = [recorded for recorded in story.said if getattr(recorded.event, "step", 0) != 1]
    assert "warmup" not in causes_ms(story, a)


# ── process pauses ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("length", "expected"), [(50, {"gc": 50}), (0, {})])
def test_gc_pause_takes_its_time_from_the_step(length: int, expected: dict[str, int]) -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 20 + length, [a])
    story.paused(at + 12, at + 12 + length)
    story.ends(at + 20 + length, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 10, **expected}


def test_overlapping_pauses_are_counted_once() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 70, [a])
    story.paused(at + 12, at + 62)
    story.paused(at + 22, at + 52, "throttled")
    story.ends(at + 70, a)
    causes = causes_ms(story, a)
    assert causes["gc"] + causes.get("throttled", 0) == 50
    assert causes["decode"] == 10


def test_capture_inside_a_compilation_is_capture() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 70, [a])
    story.paused(at + 12, at + 62, "compile")
    story.paused(at + 32, at + 52, "capture")
    story.ends(at + 70, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 10, "compile": 30, "capture": 20}


def test_streaming_causes_are_separate_from_earlier_ones() -> None:
    story, _, _ = delayed_by_prompt(prompt=4000)
    arrived = 400
    story.paused(arrived + 2, arrived + 6)
    story.paused(arrived + 12, arrived + 17)
    (record,) = [
        record for record in attributed_records(story.in_order()) if record.span_id == ids("delayed")[1]
    ]
    assert record.breakdown is not None
    assert record.breakdown.causes["gc"] == (4 + 5) * MS
    streaming = {cause: length for cause, length in record.breakdown.streaming.items() if length}
    assert streaming == {"gc": 5 * MS, "decode": 25 * MS, "interference": 80 * MS}


def test_throttling_outside_steps_is_throttled() -> None:
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
    (record,) = [record for record in attributed_records(story.in_order()) if record.span_id == ids("a")[1]]
    record.thread_delays = ThreadDelays()  # the kernel reports delays of the engine's thread
    request.attribute_latency([record])
    assert record.breakdown is not None
    assert {cause: length / 1e6 for cause, length in record.breakdown.causes.items()} == {
        "tokenize": 80,
        "throttled": 400,
        "scheduler_queue": 20,
        "prefill": 10,
        "decode": 10,
    }


def blocked_causes(story: Story, device: tuple[float, float] | None) -> dict[str, float]:
    """A step of 80 ms where 10 are usual, in which its thread slept. `device` is the device's busy time, in ms."""
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
    delays = ThreadDelays()
    delays.add_sample(events.ThreadSeen(ns(at + 100), ns(at + 20), 10 * MS, 0, 0, 0))
    assert record.steps is not None and record.cost_model is not None
    table = np.array([[1, 2], [ns(at), ns(at + 20)], [ns(at + 20), ns(at + 100)], [1, 1], [1, 1], [0, 0]])
    delays.resolve_samples(table, record.cost_model, final=True)
    record.thread_delays, record.gpu_throttled_at = delays, ((ns(at + 20), ns(at + 100)),)
    request.attribute_latency([record])
    assert record.breakdown is not None
    return {
        cause: length / 1e6 for cause, length in record.breakdown.causes.items() if cause not in _OWN_WORK
    }


_OWN_WORK = ("prefill", "decode")


def test_waiting_for_a_busy_device_is_not_blocked() -> None:
    assert blocked_causes(Story(), device=None) == {"blocked": 70}
    assert blocked_causes(Story(), device=(21, 100)) == {"blocked": 1, "gpu_throttled": 69, "host_bubble": 2}


# ── event loop ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_ingress_during_a_blocked_loop_is_event_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.submitted(180, a)
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert causes_ms(story, a) == {"ingress": 30, "event_loop": 150, "prefill": 10}


def test_submission_during_a_blocked_loop_is_ingress() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.submitted(160, a)  # by the call that blocks the loop, or by another thread
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert causes_ms(story, a) == {"ingress": 160, "scheduler_queue": 20, "prefill": 10}


def test_send_delayed_by_blocked_loop_is_event_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    story.step(10, 20, [a])
    story.paused(15, 215, "event_loop")
    story.ends(220, a, chunks=1, detokenize=2)
    assert causes_ms(story, a) == {
        "prefill": 10,
        "decode": 10,
        "event_loop": 195,
        "detokenize": 2,
        "egress": 3,
    }


def test_engine_steps_continue_while_the_loop_is_blocked() -> None:
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
    causes = causes_ms(story, a)
    assert "event_loop" not in causes
    assert causes["scheduler_queue"] == 5
    assert causes["decode"] + causes["prefill"] == 60


def test_only_awaiting_stage_waits_for_the_loop() -> None:
    story = Story()
    blocking, waiting = story.arrives(0, "blocking"), story.arrives(0, "waiting")
    story.stage("retrieval", 10, 210, blocking)
    story.stage("retrieval", 5, 220, waiting)
    story.paused(40, 211, "event_loop")
    story.ends(215, blocking)
    story.ends(225, waiting)
    assert causes_ms(story, blocking) == {
        "ingress": 10,
        "application": 200,
        "event_loop": 1,
        "unexplained": 4,
    }
    assert causes_ms(story, waiting) == {"ingress": 5, "application": 44, "event_loop": 171, "unexplained": 5}


def test_synchronous_stage_does_not_wait_for_the_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 5, 205, a)
    story.paused(40, 160, "event_loop")
    story.ends(210, a)
    assert causes_ms(story, a) == {"ingress": 5, "tokenize": 200, "unexplained": 5}


def test_gc_inside_a_blocked_loop_is_gc() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(30, 130)
    story.paused(50, 170, "event_loop")
    story.submitted(180, a)
    story.step(180, 190, [a], {a: 4})
    story.ends(190, a)
    assert causes_ms(story, a) == {"ingress": 40, "gc": 100, "event_loop": 40, "prefill": 10}


def test_request_without_an_engine_waits_for_the_loop() -> None:
    story = Story()
    a = story.arrives(0)
    story.paused(20, 170, "event_loop")
    story.ends(180, a)
    assert causes_ms(story, a) == {"event_loop": 150, "unexplained": 30}


# ── the end of a request ─────────────────────────────────────────────────────────────────────────────────────────


def test_slow_client_is_egress_final_text_is_detokenize() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(0, 10, [a], {a: 4})
    story.step(10, 20, [a])
    story.ends(120, a, chunks=1, send_wait=90, detokenize=8)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 10, "detokenize": 8, "egress": 92}


def test_request_aborted_in_the_queue_is_scheduler_queue() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(5, a)
    story.aborts(500, a)
    assert causes_ms(story, a) == {"ingress": 5, "scheduler_queue": 495}


def test_stream_cancelled_during_an_engine_hang_is_unexplained() -> None:
    story = Story()
    at = warmed_up(story)
    a = story.arrives(at, "a")
    story.step(at, at + 10, [a], {a: 4})
    story.step(at + 10, at + 20, [a])
    story.aborts(at + 20 + 6000, a)
    assert causes_ms(story, a) == {"prefill": 10, "decode": 20, "unexplained": 5990}


def generates_twice(story: Story, at: float) -> Who:
    """A request generates, searches for 2 s, and generates again behind a prompt of two steps. Another request runs meanwhile."""
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


def test_time_between_two_generations_is_application() -> None:
    story = Story()
    a = generates_twice(story, warmed_up(story))
    causes = causes_ms(story, a)
    assert causes == {
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


def test_steps_between_two_generations_are_not_interference() -> None:
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
    causes = causes_ms(story, a)
    assert causes["application"] == 285
    assert causes["scheduler_queue"] == 5
    assert "interference" not in causes


def test_overlapping_generations_leave_no_application_time() -> None:
    """Two generations; while the second continues, the first ends and a third starts."""
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
    assert "application" not in causes_ms(story, a)
    assert story.record(a).generation_gaps == ()


def test_pipeline_parallel_steps_overlap_without_interference() -> None:
    """Pipeline parallel: a step completes every 10 ms and takes 20 ms."""
    story = Story()
    first, second = story.arrives(0, "first"), story.arrives(0, "second")
    batches = [[first], [second]]
    begun = story.scheduled(0, batches[0], {first: 4})
    for n in range(1, 60):
        member = batches[n % 2]
        following = story.scheduled(10 * n + 1, member, {member[0]: 4} if n == 1 else None)
        story.done(10 * n + 10, begun)
        begun = following
    story.ends(600, first)
    story.ends(600, second)
    causes = causes_ms(story, first)
    assert causes["decode"] > 550
    assert causes.get("unexplained", 0) + causes.get("interference", 0) + causes.get("host_bubble", 0) < 30


# ── requests that are cancelled ──────────────────────────────────────────────────────────────────────────────────


def test_cancelled_behind_another_prompt_is_interference() -> None:
    story = Story()
    at = warmed_up(story)
    a, heavy = story.arrives(at, "a"), story.arrives(at, "heavy")
    story.step(at, at + 6000, [a, heavy], {a: 10, heavy: 99990})
    story.aborts(at + 5000, a)
    story.ends(at + 6000, heavy)
    causes = causes_ms(story, a)
    assert causes["interference"] > 4950 and causes["prefill"] < 50
    (record,) = [record for record in attributed_records(story.in_order()) if record.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.interferer is not None
    assert record.breakdown.interferer.trace_id == ids("heavy")[0]
    assert record.prefill_steps == [], "the step ended after the request"


def test_stream_cancelled_behind_another_prompt_is_interference() -> None:
    story = Story()
    at = warmed_up(story)
    a, heavy = story.arrives(at, "a"), story.arrives(at, "heavy")
    story.step(at, at + 10, [a], {a: 4})
    for n in range(1, 4):
        story.step(at + 10 * n, at + 10 * n + 10, [a])
    story.step(at + 40, at + 6040, [a, heavy], {heavy: 99990})
    story.aborts(at + 5040, a)
    story.ends(at + 6040, heavy)
    assert causes_ms(story, a) == {
        "prefill": 10,
        "decode": pytest.approx(40, abs=1),
        "interference": pytest.approx(4990, abs=1),
    }
    (record,) = [record for record in attributed_records(story.in_order()) if record.span_id == ids("a")[1]]
    assert record.breakdown is not None and record.breakdown.stalled_by is not None
    assert record.breakdown.stalled_by.trace_id == ids("heavy")[0]


@pytest.mark.parametrize("steps", [0, 3])
def test_cancelled_while_preempted_is_preemption(steps: int) -> None:
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
    causes = causes_ms(story, a)
    assert causes["preemption"] == pytest.approx(20_000, abs=1)
    assert sum(causes.values()) == pytest.approx(20_010 + 10 * steps)


def test_recomputing_one_of_two_sequences_is_preemption() -> None:
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
    causes = causes_ms(story, a)
    assert causes["preemption"] == pytest.approx(400, abs=11)
    assert causes["prefill"] == pytest.approx(10, abs=1)


def test_prompts_beyond_the_memory_limit_count_as_concurrent() -> None:
    story = Story()
    a = story.arrives(0, "a")
    for _ in range(600):
        story.submitted(0, a)
    story.step(0, 10, [a] * 600, tokens=dict.fromkeys(range(600), 4))
    for n in range(1, 11):
        story.step(10 * n, 10 * n + 10, [a] * 600)
    story.ends(110, a)
    assert story.record(a).tokens_after_first == 10


def test_two_engines_use_their_own_cost_models() -> None:
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
    assert causes_ms(story, a) == {"prefill": 30, "decode": 960}


def test_each_instant_of_overlapping_pauses_is_counted_once() -> None:
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
    causes = causes_ms(story, a)
    assert causes["gc"] == pytest.approx(800)
    assert causes["throttled"] == pytest.approx(800)
    assert sum(causes.values()) == 4000
