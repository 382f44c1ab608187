"""The first steps of an engine, and what of a step is of its first use."""

from __future__ import annotations

import numpy as np
import pytest

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.warmup import EARLY_STEPS, WarmupSteps, WarmupTracker

MS = 1_000_000
COSTS = StepCostModel(10 * MS, 0.0, 0.0, 100)


def first_steps(*told: tuple[int, int], seen: set[int] | None = None) -> set[int]:
    """Of steps with so many sequences and prompt tokens, those that were the first of their kind."""
    firsts = WarmupTracker(seen)
    for number, (size, prompts) in enumerate(told, 1):
        firsts.add_step(number, size, prompts)
    known = firsts.get_warmup_steps(COSTS)
    return set(known.steps) if known is not None else set()


def learned(prompts: list[tuple[int, int]]) -> WarmupSteps:
    """What is known after these steps of one sequence, (prompt tokens, ms); the first of them is a first use."""
    firsts = WarmupTracker()
    firsts.add_step(1, 1, 1)
    ended = np.cumsum([length * MS for _, length in prompts])
    started = ended - [length * MS for _, length in prompts]
    steps = np.arange(1, len(prompts) + 1) + EARLY_STEPS
    ones = np.ones(len(prompts), np.int64)
    firsts.learn_prompt_costs(
        np.array([steps, started, ended, ones, ones, [tokens for tokens, _ in prompts]]), COSTS
    )
    known = firsts.get_warmup_steps(COSTS)
    assert known is not None
    return known


def test_the_first_steps_of_an_engine_are_first_uses_whatever_their_size() -> None:
    assert first_steps(*[(1, 0)] * 10) == {1, 2, 3}


def test_so_is_the_first_step_with_a_batch_up_to_each_power_of_two() -> None:
    early = [(1, 0)] * EARLY_STEPS
    assert first_steps(*early, (2, 0), (2, 0), (3, 0), (4, 0), (5, 0), (8, 0), (9, 0)) == {
        1,
        2,
        3,
        4,
        6,
        8,
        10,
    }


def test_and_the_first_step_with_prompts_of_each_length() -> None:
    early = [(1, 0)] * EARLY_STEPS
    assert first_steps(*early, (1, 100), (1, 0), (1, 120), (1, 1000), (1, 900)) == {1, 2, 3, 4, 7}


def test_what_another_thread_of_the_engine_has_used_is_used() -> None:
    seen: set[int] = set()
    assert first_steps(*[(1, 5)] * 5, seen=seen) == {1, 2, 3}
    assert first_steps(*[(1, 5)] * 5, seen=seen) == set()
    assert first_steps((1, 5), (4, 5), seen=seen) == {2}


def test_after_a_loss_nothing_is_known_to_be_the_first() -> None:
    firsts = WarmupTracker()
    firsts.stop_tracking()
    firsts.add_step(1, 1, 1)
    assert firsts.get_warmup_steps(COSTS) is None


def test_where_nobody_knows_what_a_step_costs_nothing_is_said() -> None:
    firsts = WarmupTracker()
    firsts.add_step(1, 1, 1)
    assert firsts.get_warmup_steps(None) is None


def test_a_prompt_costs_no_more_than_its_tokens_one_by_one() -> None:
    known = learned([])
    assert known.max_prompt_cost(8) == 80 * MS
    assert known.excess_time(1, 1000 * MS, 1, 8) == 910 * MS
    assert known.excess_time(1, 90 * MS, 1, 8) == 0


def test_a_prompt_costs_no_more_than_twice_what_prompts_like_it_do() -> None:
    known = learned([(100, 30), *[(100, 20)] * 4])  # 0.1 ms each beyond the step of 10 ms
    assert known.max_prompt_cost(100) == pytest.approx(20 * MS)
    assert known.max_prompt_cost(200) == pytest.approx(40 * MS)
    assert known.max_prompt_cost(4000) == 40_000 * MS  # nothing like it was seen
    assert known.excess_time(1, 1000 * MS, 1, 100) == 970 * MS


def test_a_step_that_is_no_first_one_has_no_first_use() -> None:
    assert learned([]).excess_time(2, 1000 * MS, 1, 8) == 0


def test_steps_are_looked_for_only_where_they_can_be() -> None:
    known = learned([])
    assert known.find_rows(np.array([2, 3])) == []
    assert known.find_rows(np.array([1, 2, 3])) == [0]
