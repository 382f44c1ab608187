"""The columns of an engine's latest steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.ringbuffer import events

CAPACITY = 16


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otel_infer.assembly.engine.step_table.CAPACITY", CAPACITY)


def scheduled(step: int, kv_total: int = 8) -> events.StepScheduled:
    return events.StepScheduled(step * 10, step, False, 4, [], [], [], 2, kv_total, 4, 0)


def with_steps(*steps: int) -> StepTable:
    table = StepTable()
    for step in steps:
        table.begin_step(scheduled(step), prompt_tokens=step * 100)
        table.end_step(step, step * 10 + 5)
    return table


def test_a_step_has_its_numbers_until_as_many_came_after_it_as_are_remembered() -> None:
    table = with_steps(*range(1, CAPACITY + 2))
    assert table.last == CAPACITY + 1 and table.oldest == 2
    assert (table.ended_at(2), table.prefill_tokens(2), table.kv_usage_at(2)) == (25, 200, 0.25)
    assert (table.ended_at(1), table.prefill_tokens(1)) == (0, 0) and math.isnan(table.kv_usage_at(1))


def test_the_steps_around_the_end_of_the_columns_are_in_order() -> None:
    table = with_steps(*range(1, CAPACITY + 5))
    first, last = CAPACITY - 2, CAPACITY + 3
    columns = np.concatenate(table.get_columns(first, last), axis=1)
    assert columns[RequestSteps.STEP].tolist() == list(range(first, last + 1))
    assert columns[RequestSteps.ENDED_AT].tolist() == [step * 10 + 5 for step in range(first, last + 1)]
    assert table.latest_steps(3)[RequestSteps.STEP].tolist() == list(range(CAPACITY + 1, CAPACITY + 5))


def test_of_a_step_that_is_missing_nothing_is_known() -> None:
    table = with_steps(1, 3)
    table.end_step(2, 99)
    assert (table.ended_at(2), table.prefill_tokens(2)) == (0, 0)
    assert (table.ended_at(1), table.ended_at(3)) == (15, 35)


def test_a_step_that_is_not_done_has_no_end_though_an_older_one_was_in_its_place() -> None:
    table = with_steps(*range(1, CAPACITY + 1))
    table.begin_step(scheduled(CAPACITY + 1), 0)
    assert table.ended_at(CAPACITY + 1) == 0


def test_where_an_engine_has_no_blocks_its_utilisation_is_not_known() -> None:
    table = StepTable()
    table.begin_step(scheduled(1, kv_total=0), 0)
    assert math.isnan(table.kv_usage_at(1))


def test_prompt_tokens_that_turned_out_to_be_none_are_taken_back() -> None:
    table = with_steps(1)
    table.subtract_prompt_tokens(1, fewer=30)
    assert table.prefill_tokens(1) == 70
