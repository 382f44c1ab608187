"""The baseline of an engine: cost model, warmup and thread delays, learned from its steps."""

from __future__ import annotations

from otel_infer.assembly.engine.baseline import FIT_EVERY, FIT_FIRST, FIT_OVER, EngineBaseline
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.ringbuffer import events

MS = 1_000_000
LENGTH = 10 * MS


def engine(steps: int, length: int = LENGTH, before: int = 0) -> tuple[StepTable, EngineBaseline]:
    """Returns the table and baseline of an engine with this many steps, and more `before` them, not read."""
    table = StepTable()
    table.last = before
    baseline = EngineBaseline(table)
    add_steps(table, baseline, steps, length)
    return table, baseline


def add_steps(table: StepTable, baseline: EngineBaseline, steps: int, length: int = LENGTH) -> None:
    for step in range(table.last + 1, table.last + 1 + steps):
        table.begin_step(events.StepScheduled(step * LENGTH, step, False, 4, [], [], [], 0, 0, 4, 0), 0)
        baseline.warmup.add_step(step, 4, 0)
        table.end_step(step, step * LENGTH + length)
        baseline.record_step_end(step * LENGTH + length)


def add_prompt_steps(table: StepTable, baseline: EngineBaseline, steps: int) -> None:
    for step in range(table.last + 1, table.last + 1 + steps):
        prompts = [(0, 500)]
        table.begin_step(
            events.StepScheduled(step * LENGTH, step, False, 4, [], [], prompts, 0, 0, 4, 0), 500
        )
        table.end_step(step, step * LENGTH + LENGTH)
        baseline.record_step_end(step * LENGTH + LENGTH)
        baseline.get_cost_model()


def thread_sample(since: int, until: int, waited: int) -> events.ThreadSeen:
    nothing = dict.fromkeys(events.ThreadSeen._fields, 0)
    ran = until - since - waited
    return events.ThreadSeen(**{**nothing, "at": until, "since": since, "ran_ns": ran, "waited_ns": waited})


def test_cost_model_is_refitted_periodically() -> None:
    table, baseline = engine(FIT_FIRST - 1)
    assert baseline.get_model_and_warmup() == (None, None)
    add_steps(table, baseline, 1)
    costs, first_use = baseline.get_model_and_warmup()
    assert costs is not None and costs.base + 4 * costs.per_sequence == LENGTH
    assert first_use is not None and 1 in first_use.steps and first_use.latest == max(first_use.steps)
    add_steps(table, baseline, 1)
    assert baseline.get_cost_model() is costs
    add_steps(table, baseline, FIT_EVERY)
    assert baseline.get_cost_model() is not costs


def test_cost_model_needs_as_many_steps_after_a_late_start() -> None:
    """A restarted reader, or a dump, starts at a high step number."""
    table, baseline = engine(FIT_FIRST - 1, before=500_000)
    assert baseline.get_cost_model() is None
    add_steps(table, baseline, 1)
    assert baseline.get_cost_model() is not None


def test_fit_without_a_result_is_repeated_soon() -> None:
    table, baseline = engine(0)
    add_prompt_steps(table, baseline, FIT_EVERY)
    assert baseline.get_cost_model() is None
    add_steps(table, baseline, FIT_FIRST)
    assert baseline.get_cost_model() is not None


def test_cost_model_is_kept_during_prompt_steps() -> None:
    table, baseline = engine(FIT_FIRST)
    costs = baseline.get_cost_model()
    assert costs is not None
    add_prompt_steps(table, baseline, FIT_OVER + FIT_EVERY)
    assert baseline.get_cost_model() == costs


def test_warmup_is_shared_until_it_changes() -> None:
    table, baseline = engine(FIT_FIRST)
    assert baseline.get_model_and_warmup()[1] is baseline.get_model_and_warmup()[1]
    before = baseline.get_model_and_warmup()[1]
    baseline.warmup.add_step(table.last + 1, 400, 0)
    after = baseline.get_model_and_warmup()[1]
    assert before is not None and after is not None and after.steps == before.steps | {table.last + 1}


def test_thread_sample_counts_after_its_steps_end() -> None:
    """A sample is resolved when a later one exists and its steps have ended."""
    table, baseline = engine(FIT_FIRST)
    at = table.last * LENGTH
    baseline.thread_delays.add_sample(thread_sample(at, at + 2 * LENGTH, waited=LENGTH))
    add_steps(table, baseline, 4)
    assert not baseline.thread_delays.delay_in_interval(at, at + 2 * LENGTH)[0]
    baseline.thread_delays.add_sample(thread_sample(at + 2 * LENGTH, at + 4 * LENGTH, waited=0))
    add_steps(table, baseline, 1)
    assert baseline.thread_delays.delay_in_interval(at, at + 2 * LENGTH)[0] == LENGTH


def test_last_thread_sample_counts_at_shutdown() -> None:
    table, baseline = engine(FIT_FIRST)
    at = table.last * LENGTH
    baseline.thread_delays.add_sample(thread_sample(at, at + LENGTH, waited=LENGTH // 2))
    baseline.resolve_pending(at, final=True)
    assert (
        baseline.thread_delays.delay_in_interval(at, at + LENGTH)[0] == LENGTH // 2
        and not baseline.thread_delays.has_pending
    )
