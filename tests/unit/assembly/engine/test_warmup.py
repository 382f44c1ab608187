"""Warmup: the first steps of an engine, and the part of a step caused by a first use."""

from __future__ import annotations

import numpy as np
import pytest

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.warmup import EARLY_STEPS, StepKinds, WarmupSteps, WarmupTracker

MS = 1_000_000
COSTS = StepCostModel(10 * MS, 0.0, 0.0, 100)


def warmup_steps(*steps: tuple[int, int], seen: StepKinds | None = None) -> set[int]:
    """Returns the numbers of the steps that were the first of their kind; steps are (sequences, prompt tokens)."""
    tracker = WarmupTracker(seen)
    for number, (size, prompts) in enumerate(steps, 1):
        tracker.add_step(number, size, prompts)
    warmup = tracker.get_warmup_steps(COSTS)
    return set(warmup.steps) if warmup is not None else set()


def learned_warmup(prompts: list[tuple[int, int]]) -> WarmupSteps:
    """Returns the warmup state after steps of one sequence, (prompt tokens, ms). The first step is a first use."""
    tracker = WarmupTracker()
    tracker.add_step(1, 1, 1)
    ended = np.cumsum([length * MS for _, length in prompts])
    started = ended - [length * MS for _, length in prompts]
    steps = np.arange(1, len(prompts) + 1) + EARLY_STEPS
    ones = np.ones(len(prompts), np.int64)
    tracker.learn_prompt_costs(
        np.array([steps, started, ended, ones, ones, [tokens for tokens, _ in prompts]]), COSTS
    )
    warmup = tracker.get_warmup_steps(COSTS)
    assert warmup is not None
    return warmup


def test_first_steps_of_an_engine_are_warmup() -> None:
    assert warmup_steps(*[(1, 0)] * 10) == {1, 2, 3}


def test_first_step_per_power_of_two_is_warmup() -> None:
    early = [(1, 0)] * EARLY_STEPS
    assert warmup_steps(*early, (2, 0), (2, 0), (3, 0), (4, 0), (5, 0), (8, 0), (9, 0)) == {
        1,
        2,
        3,
        4,
        6,
        8,
        10,
    }


def test_first_step_per_prompt_size_is_warmup() -> None:
    early = [(1, 0)] * EARLY_STEPS
    assert warmup_steps(*early, (1, 100), (1, 0), (1, 120), (1, 1000), (1, 900)) == {1, 2, 3, 4, 7}


def test_warmup_is_shared_between_engine_threads() -> None:
    seen = StepKinds()
    assert warmup_steps(*[(1, 5)] * 5, seen=seen) == {1, 2, 3}
    assert warmup_steps(*[(1, 5)] * 5, seen=seen) == set()
    assert warmup_steps((1, 5), (4, 5), seen=seen) == {2}


def test_after_a_loss_no_step_is_warmup() -> None:
    tracker = WarmupTracker()
    tracker.stop_tracking()
    tracker.add_step(1, 1, 1)
    assert tracker.get_warmup_steps(COSTS) is None


def test_without_a_cost_model_there_is_no_warmup() -> None:
    tracker = WarmupTracker()
    tracker.add_step(1, 1, 1)
    assert tracker.get_warmup_steps(None) is None


def test_prompt_costs_at_most_its_single_tokens() -> None:
    warmup = learned_warmup([])
    assert warmup.max_prompt_cost(8) == 80 * MS
    assert warmup.excess_time(1, 1000 * MS, 1, 8) == 910 * MS
    assert warmup.excess_time(1, 90 * MS, 1, 8) == 0


def test_prompt_costs_at_most_twice_similar_prompts() -> None:
    warmup = learned_warmup([(100, 30), *[(100, 20)] * 4])  # 0.1 ms each beyond the step of 10 ms
    assert warmup.max_prompt_cost(100) == pytest.approx(20 * MS)
    assert warmup.max_prompt_cost(200) == pytest.approx(40 * MS)
    assert warmup.max_prompt_cost(4000) == 40_000 * MS  # no prompt of similar size was seen
    assert warmup.excess_time(1, 1000 * MS, 1, 100) == 970 * MS


def test_later_steps_have_no_excess_time() -> None:
    assert learned_warmup([]).excess_time(2, 1000 * MS, 1, 8) == 0


def test_rows_are_found_for_warmup_steps_only() -> None:
    warmup = learned_warmup([])
    assert warmup.find_rows(np.array([2, 3])) == []
    assert warmup.find_rows(np.array([1, 2, 3])) == [0]
