"""The history of prefills by step: which request computed how many prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer.assembly.engine import prefill_history
from otel_infer.assembly.engine.prefill_history import PrefillHistory
from otel_infer.assembly.engine.types import PrefillInStep


def prefills(count: int) -> list[PrefillInStep]:
    return [PrefillInStep(bytes(16), number.to_bytes(8, "little"), 10) for number in range(count)]


def prefills_in(history: PrefillHistory, step: int) -> Sequence[PrefillInStep]:
    return history.freeze().get(step, ())


def test_step_without_prompts_has_none() -> None:
    history = PrefillHistory()
    history.add_prefills(1, [])
    assert prefills_in(history, 1) == ()


def test_oldest_steps_are_evicted_by_prompt_count() -> None:
    history = PrefillHistory()
    each = prefill_history.MAX_PREFILLS // 4
    for step in range(1, 6):
        history.add_prefills(step, prefills(each))
    assert prefills_in(history, 1) == ()
    assert [len(prefills_in(history, step)) for step in range(2, 6)] == [each] * 4


def test_many_steps_with_one_prompt_are_kept() -> None:
    history = PrefillHistory()
    for step in range(1, prefill_history.MAX_PREFILLS + 1):
        history.add_prefills(step, prefills(1))
    assert prefills_in(history, 1)
    history.add_prefills(prefill_history.MAX_PREFILLS + 1, prefills(1))
    assert prefills_in(history, 1) == ()


def test_correction_changes_one_request_only() -> None:
    history = PrefillHistory()
    first, second = prefills(2)
    history.add_prefills(7, [first, second])
    history.correct_tokens(7, second.span_id, 3)
    assert prefills_in(history, 7) == (first, second._replace(tokens=3))


def test_correction_does_not_restore_an_evicted_step() -> None:
    history = PrefillHistory()
    history.correct_tokens(7, bytes(8), 3)
    assert prefills_in(history, 7) == ()
