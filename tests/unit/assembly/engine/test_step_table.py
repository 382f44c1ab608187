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
def small_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otel_infer.assembly.engine.step_table.CAPACITY", CAPACITY)


def scheduled(step: int, kv_total: int = 8) -> events.StepScheduled:
    return events.StepScheduled(step * 10, step, False, 4, [], [], [], 2, kv_total, 4, 0)


def with_steps(*steps: int) -> StepTable:
    table = StepTable()
    for step in steps:
        table.begin_step(scheduled(step), prompt_tokens=step * 100)
        table.end_step(step, step * 10 + 5)
    return table


def test_oldest_step_is_evicted_beyond_capacity() -> None:
    table = with_steps(*range(1, CAPACITY + 2))
    assert table.last == CAPACITY + 1 and table.oldest == 2
    assert (table.ended_at(2), table.prefill_tokens(2), table.kv_usage_at(2)) == (25, 200, 0.25)
    assert (table.ended_at(1), table.prefill_tokens(1)) == (0, 0) and math.isnan(table.kv_usage_at(1))


def test_steps_are_ordered_across_the_wraparound() -> None:
    table = with_steps(*range(1, CAPACITY + 5))
    first, last = CAPACITY - 2, CAPACITY + 3
    columns = np.concatenate(table.get_columns(first, last), axis=1)
    assert columns[RequestSteps.STEP].tolist() == list(range(first, last + 1))
    assert columns[RequestSteps.ENDED_AT].tolist() == [step * 10 + 5 for step in range(first, last + 1)]
    assert table.latest_steps(3)[RequestSteps.STEP].tolist() == list(range(CAPACITY + 1, CAPACITY + 5))


def test_missing_step_has_zero_values() -> None:
    table = with_steps(1, 3)
    table.end_step(2, 99)
    assert (table.ended_at(2), table.prefill_tokens(2)) == (0, 0)
    assert (table.ended_at(1), table.ended_at(3)) == (15, 35)


def test_unfinished_step_has_no_end_time() -> None:
    """An older step occupied the same row."""
    table = with_steps(*range(1, CAPACITY + 1))
    table.begin_step(scheduled(CAPACITY + 1), 0)
    assert table.ended_at(CAPACITY + 1) == 0


def test_kv_usage_is_nan_without_blocks() -> None:
    table = StepTable()
    table.begin_step(scheduled(1, kv_total=0), 0)
    assert math.isnan(table.kv_usage_at(1))


def test_prompt_tokens_can_be_subtracted() -> None:
    table = with_steps(1)
    table.subtract_prompt_tokens(1, fewer=30)
    assert table.prefill_tokens(1) == 70
