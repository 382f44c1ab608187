"""What is learned of an engine from its steps."""

from __future__ import annotations

from otel_infer.assembly.engine.baseline import FIT_EVERY, FIT_FIRST, FIT_OVER, EngineBaseline
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.ringbuffer import events

MS = 1_000_000
LENGTH = 10 * MS


def engine(steps: int, length: int = LENGTH) -> tuple[StepTable, EngineBaseline]:
    table = StepTable()
    learned = EngineBaseline(table)
    go_on(table, learned, steps, length)
    return table, learned


def go_on(table: StepTable, learned: EngineBaseline, steps: int, length: int = LENGTH) -> None:
    for step in range(table.last + 1, table.last + 1 + steps):
        table.begin_step(events.StepScheduled(step * LENGTH, step, False, 4, [], [], [], 0, 0, 4, 0), 0)
        learned.warmup.add_step(step, 4, 0)
        table.end_step(step, step * LENGTH + length)
        learned.record_step_end(step * LENGTH + length)


def look(since: int, until: int, waited: int) -> events.ThreadSeen:
    nothing = dict.fromkeys(events.ThreadSeen._fields, 0)
    ran = until - since - waited
    return events.ThreadSeen(**{**nothing, "at": until, "since": since, "ran_ns": ran, "waited_ns": waited})


def test_what_a_step_costs_is_known_after_some_and_estimated_anew_now_and_then() -> None:
    table, learned = engine(FIT_FIRST - 1)
    assert learned.get_model_and_warmup() == (None, None)
    go_on(table, learned, 1)
    costs, first_use = learned.get_model_and_warmup()
    assert costs is not None and costs.base + 4 * costs.per_sequence == LENGTH
    assert first_use is not None and 1 in first_use.steps and first_use.latest == max(first_use.steps)
    go_on(table, learned, 1)
    assert learned.get_cost_model() is costs
    go_on(table, learned, FIT_EVERY)
    assert learned.get_cost_model() is not costs


def test_what_steps_without_prompts_cost_is_remembered_while_there_are_none() -> None:
    table, learned = engine(FIT_FIRST)
    costs = learned.get_cost_model()
    assert costs is not None
    for step in range(table.last + 1, table.last + 1 + FIT_OVER + FIT_EVERY):
        prompts = [(0, 500)]
        table.begin_step(
            events.StepScheduled(step * LENGTH, step, False, 4, [], [], prompts, 0, 0, 4, 0), 500
        )
        table.end_step(step, step * LENGTH + LENGTH)
        learned.record_step_end(step * LENGTH + LENGTH)
        learned.get_cost_model()
    assert learned.get_cost_model() == costs


def test_while_nothing_new_is_learned_all_requests_share_what_is_known() -> None:
    table, learned = engine(FIT_FIRST)
    assert learned.get_model_and_warmup()[1] is learned.get_model_and_warmup()[1]
    before = learned.get_model_and_warmup()[1]
    learned.warmup.add_step(table.last + 1, 400, 0)
    after = learned.get_model_and_warmup()[1]
    assert before is not None and after is not None and after.steps == before.steps | {table.last + 1}


def test_a_look_at_the_thread_counts_once_a_later_one_is_there_and_its_steps_are_done() -> None:
    table, learned = engine(FIT_FIRST)
    at = table.last * LENGTH
    learned.thread_delays.add_sample(look(at, at + 2 * LENGTH, waited=LENGTH))
    go_on(table, learned, 4)
    assert not learned.thread_delays.delay_in_interval(at, at + 2 * LENGTH)[0]
    learned.thread_delays.add_sample(look(at + 2 * LENGTH, at + 4 * LENGTH, waited=0))
    go_on(table, learned, 1)
    assert learned.thread_delays.delay_in_interval(at, at + 2 * LENGTH)[0] == LENGTH


def test_a_last_look_counts_when_nothing_more_is_to_come() -> None:
    table, learned = engine(FIT_FIRST)
    at = table.last * LENGTH
    learned.thread_delays.add_sample(look(at, at + LENGTH, waited=LENGTH // 2))
    learned.resolve_pending()
    assert (
        learned.thread_delays.delay_in_interval(at, at + LENGTH)[0] == LENGTH // 2
        and not learned.thread_delays.has_pending
    )
