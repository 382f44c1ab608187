"""Which steps of an engine are the first of their kind, and what of them is slow for once. Pure.

The first steps of an engine load kernels, make plans, fill caches; so does the first one with a batch, or with prompts, of a
size that was not there before (up to 1, 2, 4, 8 …). What such a step took longer than others like it is the work of nobody.

What prompts cost is not known as what a sequence costs is (`stepcosts`), so they are given what they cost at most: twice what
prompts of about that length usually do, once enough of them were seen, and never more than their tokens one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel

EARLY_STEPS = 3
"""Steps of an engine that are first uses whatever their size."""
MIN_PROMPTS = 3
"""Prompts of about a length without which it is not known what they cost."""
_SIMILAR_CLASSES = 2  # powers of two
_MAX_RATE_FACTOR = 2.0


class WarmupSteps(NamedTuple):
    """The steps of an engine that were the first of their kind, and the latest of them.

    `rates`: what a token of prompts of a size usually costs, ns.
    """

    steps: frozenset[int]
    latest: int
    cost_model: StepCostModel
    rates: Mapping[int, float]

    def find_rows(self, steps: Any) -> list[int]:
        """Where they are in a column of numbers."""
        if not len(steps) or steps[0] > self.latest:
            return []
        found: list[int] = np.flatnonzero(np.isin(steps, list(self.steps))).tolist()
        return found

    def max_prompt_cost(self, tokens: int) -> float:
        """What prompts of so many tokens add to a step, ns."""
        near = range(_size_class(tokens) - _SIMILAR_CLASSES, _size_class(tokens) + _SIMILAR_CLASSES + 1)
        rate = max((self.rates[size] for size in near if size in self.rates), default=None)
        one_by_one = self.cost_model.base * tokens
        return one_by_one if rate is None else min(rate * tokens * _MAX_RATE_FACTOR, one_by_one)

    def excess_time(self, step: int, length: int, size: int, tokens: int) -> int:
        """What of the `length` (ns) of a step with prompts is of its first use; 0 if it is none."""
        if step not in self.steps:
            return 0
        usual = self.cost_model.base + self.cost_model.per_sequence * size
        return max(length - int(usual + self.max_prompt_cost(tokens)), 0)


class WarmupTracker:
    """Notes the first steps of an engine. `seen`: the kinds there were, shared by its logs on several threads."""

    def __init__(self, seen: set[int] | None = None) -> None:
        self._seen_kinds: set[int] = set() if seen is None else seen
        self._early_until = 0 if self._seen_kinds else EARLY_STEPS
        self._steps: frozenset[int] = frozenset()
        self._rates: dict[int, float] = {}
        self._warmup_steps: WarmupSteps | None = None
        self._is_tracking = True

    def add_step(self, step: int, size: int, prompt_tokens: int) -> None:
        """A step with so many sequences, and so many tokens of prompts among them."""
        batch, prompts = (size - 1).bit_length(), ~_size_class(prompt_tokens)
        if batch in self._seen_kinds and prompts in self._seen_kinds and step > self._early_until:
            return
        self._seen_kinds.update((batch, prompts))
        if self._is_tracking:
            self._steps |= {step}
            self._warmup_steps = None

    def stop_tracking(self) -> None:
        """Steps are missing: of no later one is it known to be a first."""
        self._is_tracking = False

    def learn_prompt_costs(self, table: Any, costs: StepCostModel | None) -> None:
        """What prompts cost, from a step log's columns (lines of `StepRows`, prompt tokens of all in the last)."""
        if costs is None:
            return
        step, started, ended, _, size, prompts = table
        lengths = ended[1:] - np.maximum(started[1:], ended[:-1])
        usable = (prompts[1:] > 0) & (ended[1:] > 0) & (ended[:-1] > 0) & (step[1:] - step[:-1] == 1)
        usable &= ~np.isin(step[1:], list(self._steps))
        tokens = prompts[1:][usable]
        added = lengths[usable] - costs.base - costs.per_sequence * size[1:][usable]
        sizes = np.array([_size_class(int(one)) for one in tokens], np.int64)
        rates = dict(self._rates)
        for kind, often in zip(*np.unique(sizes, return_counts=True)):
            if often >= MIN_PROMPTS:
                rate = float(np.median((added / tokens)[sizes == kind]))
                rates[int(kind)] = max(rate, 0.0)
        self._rates, self._warmup_steps = rates, None

    def get_warmup_steps(self, costs: StepCostModel | None) -> WarmupSteps | None:
        """What is known by now; None where nobody knows what a step costs, or no first one was seen."""
        if costs is None or not self._steps:
            return None
        if self._warmup_steps is None or self._warmup_steps.cost_model is not costs:
            self._warmup_steps = WarmupSteps(self._steps, max(self._steps), costs, self._rates)
        return self._warmup_steps


def _size_class(tokens: int) -> int:
    return tokens.bit_length()
