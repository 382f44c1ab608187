"""Whose prompts were in which steps."""

from __future__ import annotations

from otel_infer.assembly.engine import step_log
from otel_infer.assembly.engine.step_log import PrefillHistory
from otel_infer.assembly.engine.types import PrefillInStep


def some(count: int) -> list[PrefillInStep]:
    return [PrefillInStep(bytes(16), number.to_bytes(8, "little"), 10) for number in range(count)]


def test_a_step_without_prompts_has_none() -> None:
    known = PrefillHistory()
    known.add_prefills(1, [])
    assert known.get_prefills(1) == ()


def test_the_oldest_steps_are_forgotten_by_the_number_of_prompts_in_them() -> None:
    known = PrefillHistory()
    each = step_log.MAX_PREFILLS // 4
    for step in range(1, 6):
        known.add_prefills(step, some(each))
    assert known.get_prefills(1) == ()
    assert [len(known.get_prefills(step)) for step in range(2, 6)] == [each] * 4


def test_where_each_step_has_one_prompt_many_steps_are_remembered() -> None:
    known = PrefillHistory()
    for step in range(1, step_log.MAX_PREFILLS + 1):
        known.add_prefills(step, some(1))
    assert known.get_prefills(1)
    known.add_prefills(step_log.MAX_PREFILLS + 1, some(1))
    assert known.get_prefills(1) == ()


def test_a_step_is_corrected_for_the_one_request_only() -> None:
    known = PrefillHistory()
    first, second = some(2)
    known.add_prefills(7, [first, second])
    known.correct_tokens(7, second.span_id, 3)
    assert known.get_prefills(7) == (first, second._replace(tokens=3))


def test_a_step_that_is_forgotten_is_not_remembered_by_a_correction() -> None:
    known = PrefillHistory()
    known.correct_tokens(7, bytes(8), 3)
    assert known.get_prefills(7) == ()
