"""The steps of each request: records read from real rings, compared with the ledger of an engine simulator."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.ringbuffer import events, layout
from tests.support.simulator import Simulator, Tick, records_by_number, ticks, tokens_by_step
from tests.support.story import ENGINE, PROCESS, Story

DEPTHS = st.integers(1, 2)
SMALL = layout.RingSizes(cells=8192, live_slots=256, strings=64, step_cells=32)


def expected_ledgers(simulator: Simulator) -> dict[int, dict[int, int]]:
    return {request.number: request.ledger for request in simulator.requests}


@settings(max_examples=150, deadline=None)
@given(ticks(), DEPTHS)
def test_each_request_has_exactly_its_steps_and_tokens(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    assert {
        number: tokens_by_step(record) for number, record in records_by_number(simulator.records).items()
    } == expected_ledgers(simulator)
    assert len(simulator.records) == len(simulator.requests)
    for request in simulator.requests:
        record = records_by_number(simulator.records)[request.number]
        assert not record.telemetry_lost
        assert record.output_tokens == sum(request.ledger.values())
        assert record.preemptions == request.preemptions


@settings(max_examples=150, deadline=None)
@given(ticks(sequences=1), DEPTHS)
def test_prompts_chunks_and_first_token_match_the_engine(program: list[Tick], depth: int) -> None:
    with Simulator(depth) as simulator:
        simulator.run(program)
    for request in simulator.requests:
        record = records_by_number(simulator.records)[request.number]
        rows = record.steps
        assert record.discarded == request.discarded
        if rows is None:
            assert request.ledger == {}
            assert record.first_token_at == 0
            continue
        assert dict(zip(rows.step.tolist(), rows.others_prefill_tokens.tolist())) == request.others
        assert [(chunk.step, chunk.tokens) for chunk in record.prefill_steps] == request.chunks
        first, last = min(request.done_at.values()), max(request.done_at.values())
        assert (record.first_token_at, record.last_token_at) == (first, last)
        queue = record.find_stage("queue")
        assert queue is not None and queue.ended_at == request.scheduled_at


@settings(max_examples=150, deadline=None)
@given(ticks(max_ticks=80), DEPTHS, st.lists(st.tuples(st.integers(0, 79), st.integers(1, 30)), max_size=3))
def test_lost_steps_leave_correct_or_missing_data(
    program: list[Tick], depth: int, stalls: list[tuple[int, int]]
) -> None:
    """A reader that stalls for some ticks is lapped by the writer of a very small ring."""
    asleep = {tick for begin, length in stalls for tick in range(begin, begin + length)}
    program = [tick._replace(poll=number not in asleep) for number, tick in enumerate(program)]
    with Simulator(depth, SMALL) as simulator:
        simulator.run(program)
    assert len(simulator.records) == len(simulator.requests)
    for request in simulator.requests:
        record = records_by_number(simulator.records)[request.number]
        assert tokens_by_step(record).items() <= request.ledger.items()
        if not record.telemetry_lost:
            assert tokens_by_step(record) == request.ledger
        instants = {stage.name: (stage.started_at, stage.ended_at) for stage in record.stages}
        first, last = min(request.done_at.values(), default=0), max(request.done_at.values(), default=0)
        if record.outcome == events.OK:
            assert record.output_tokens in (0, sum(request.ledger.values()))
            assert instants.get("queue", (0, request.scheduled_at))[1] == request.scheduled_at
            assert instants.get("prefill", (0, first))[1] == first
            began, ended = instants.get("decode", (first, last))
            assert began == first and last <= ended <= record.ended_at
            assert record.first_token_at in (0, first)


def test_prefilling_request_is_removed_when_its_record_ends() -> None:
    """An embedding, or a failed `generate`: the next batch starts long after it."""
    story = Story()
    assembler = Assembler()
    for number in range(50):
        at = 1000 * number
        member = story.arrives(at, f"r{number}")
        step = story.scheduled(at + 1, [member], prompt={member: 5}, keyframe=True)
        story.done(at + 2, step, {member: 0})
        story.ends(at + 3, member)
    for recorded in story.in_order():
        assembler.feed_events([recorded])
        assembler.drain_records(recorded.event.at)
    assert len(assembler.engines[ENGINE]._prefilling) <= 1


def test_unknown_step_is_not_waited_for() -> None:
    """A flight recorder's recording may begin with such a step and contain nothing else of it."""
    log, finals = EngineStepLog("toy", 7, 1, lambda handle: None), list[bool]()
    log.baseline.resolve_pending = lambda ended_at, final: finals.append(final)  # type: ignore[method-assign]
    log.begin_step(events.StepScheduled(10, 4, False, 0, (), (), (), 0, 0, 0, 0))
    log.begin_step(events.StepScheduled(10, 5, True, 1, (), (9,), (), 0, 0, 0, 0))
    log.resolve_pending(0)
    assert finals == [False]
    assert log.end_step(events.StepDone(20, 5, (), 0)) is not None
    log.resolve_pending(0)
    assert finals == [False, True]


def feed(story: Story) -> Assembler:
    """Returns the assembler after all events of the story."""
    assembler = Assembler()
    assembler.feed_events(story.in_order())
    return assembler


def test_steps_after_the_client_left_are_abandoned() -> None:
    story = Story()
    request = story.arrives(0)
    story.step(0, 10, [request], {request: 4})
    story.step(10, 20, [request])
    story.aborts(20, request)
    for at in range(20, 1020, 100):  # it is concluded meanwhile
        story.step(at, at + 100, [request])
    assembler = feed(story)
    assert assembler.workers.measure_work() == (1_020_000_000, 1_000_000_000)
    assembler.feed_events([events.RecordedEvent(PROCESS, 0, events.ProcessDied(at=10**15))])
    assert not assembler.engines
    assert assembler.workers.measure_work() == (1_020_000_000, 1_000_000_000)


def test_steps_of_a_finished_or_unknown_request_are_not_abandoned() -> None:
    story = Story()
    request = story.arrives(0)
    story.step(0, 10, [request], {request: 4})
    story.ends(10, request)
    story.step(10, 20, [request])  # was in flight
    unknown = story.arrives(30)._replace(handle=0)
    story.step(30, 40, [unknown])
    assert feed(story).workers.measure_work() == (30_000_000, 0)
