"""What is learned of an engine from its steps."""

from __future__ import annotations

from otel_infer.assembly.engine.baseline import FIT_EVERY, FIT_FIRST, FIT_OVER, Learned
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.ringbuffer import events

MS = 1_000_000
LENGTH = 10 * MS


def engine(steps: int, length: int = LENGTH) -> tuple[StepTable, Learned]:
    table = StepTable()
    learned = Learned(table)
    go_on(table, learned, steps, length)
    return table, learned


def go_on(table: StepTable, learned: Learned, steps: int, length: int = LENGTH) -> None:
    for step in range(table.last + 1, table.last + 1 + steps):
        table.begin(events.StepScheduled(step * LENGTH, step, False, 4, [], [], [], 0, 0, 4, 0), 0)
        learned.firsts.scheduled(step, 4, 0)
        table.end(step, step * LENGTH + length)
        learned.done(step * LENGTH + length)


def look(since: int, until: int, waited: int) -> events.ThreadSeen:
    nothing = dict.fromkeys(events.ThreadSeen._fields, 0)
    ran = until - since - waited
    return events.ThreadSeen(**{**nothing, "at": until, "since": since, "ran_ns": ran, "waited_ns": waited})


def test_what_a_step_costs_is_known_after_some_and_estimated_anew_now_and_then() -> None:
    table, learned = engine(FIT_FIRST - 1)
    assert learned.known() == (None, None)
    go_on(table, learned, 1)
    costs, first_use = learned.known()
    assert costs is not None and costs.base + 4 * costs.per_sequence == LENGTH
    assert first_use is not None and 1 in first_use.steps and first_use.latest == max(first_use.steps)
    go_on(table, learned, 1)
    assert learned.costs() is costs
    go_on(table, learned, FIT_EVERY)
    assert learned.costs() is not costs


def test_what_steps_without_prompts_cost_is_remembered_while_there_are_none() -> None:
    table, learned = engine(FIT_FIRST)
    costs = learned.costs()
    assert costs is not None
    for step in range(table.last + 1, table.last + 1 + FIT_OVER + FIT_EVERY):
        prompts = [(0, 500)]
        table.begin(events.StepScheduled(step * LENGTH, step, False, 4, [], [], prompts, 0, 0, 4, 0), 500)
        table.end(step, step * LENGTH + LENGTH)
        learned.done(step * LENGTH + LENGTH)
        learned.costs()
    assert learned.costs() == costs


def test_while_nothing_new_is_learned_all_requests_share_what_is_known() -> None:
    table, learned = engine(FIT_FIRST)
    assert learned.known()[1] is learned.known()[1]
    before = learned.known()[1]
    learned.firsts.scheduled(table.last + 1, 400, 0)
    after = learned.known()[1]
    assert before is not None and after is not None and after.steps == before.steps | {table.last + 1}


def test_a_look_at_the_thread_counts_once_a_later_one_is_there_and_its_steps_are_done() -> None:
    table, learned = engine(FIT_FIRST)
    at = table.last * LENGTH
    learned.strain.look(look(at, at + 2 * LENGTH, waited=LENGTH))
    go_on(table, learned, 4)
    assert not learned.strain.held(at, at + 2 * LENGTH)[0]
    learned.strain.look(look(at + 2 * LENGTH, at + 4 * LENGTH, waited=0))
    go_on(table, learned, 1)
    assert learned.strain.held(at, at + 2 * LENGTH)[0] == LENGTH


def test_a_last_look_counts_when_nothing_more_is_to_come() -> None:
    table, learned = engine(FIT_FIRST)
    at = table.last * LENGTH
    learned.strain.look(look(at, at + LENGTH, waited=LENGTH // 2))
    learned.settle()
    assert learned.strain.held(at, at + LENGTH)[0] == LENGTH // 2 and not learned.strain.waits
