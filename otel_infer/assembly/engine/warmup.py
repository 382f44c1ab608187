"""Warmup steps of an engine: the first steps of their kind, and their excess time. Pure.

The first steps of an engine load kernels, make plans and fill caches. So does the first step with a batch
size, or a number of prompt tokens, that was not there before (up to 1, 2, 4, 8 …). The excess of such a step
over others like it is not caused by any request.

The cost of a prompt is known less well than the cost of a sequence (`step_cost`), so an upper bound is used.
It is twice the usual cost of prompts of about that length, once enough of them were measured. It is never
more than the cost of the prompt's tokens as one decode step each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel

EARLY_STEPS = 3
"""First steps of an engine that are warmup steps, whatever their size."""
MIN_PROMPTS = 3
"""Steps with prompts of about one length before their cost is known."""
_SIMILAR_CLASSES = 2  # powers of two
_MAX_RATE_FACTOR = 2.0


class WarmupSteps(NamedTuple):
    """The warmup steps of an engine, and the latest of them.

    `rates`: the usual cost of a prompt token, ns, by size class of the prompts.
    """

    steps: frozenset[int]
    latest: int
    cost_model: StepCostModel
    rates: Mapping[int, float]

    def find_rows(self, steps: Any) -> list[int]:
        """Returns the indexes of warmup steps in a column of step numbers."""
        if not len(steps) or steps[0] > self.latest:
            return []
        rows: list[int] = np.flatnonzero(np.isin(steps, list(self.steps))).tolist()
        return rows

    def max_prompt_cost(self, tokens: int) -> float:
        """Returns the most that this many prompt tokens add to a step, ns."""
        near = range(_size_class(tokens) - _SIMILAR_CLASSES, _size_class(tokens) + _SIMILAR_CLASSES + 1)
        rate = max((self.rates[size] for size in near if size in self.rates), default=None)
        one_by_one = self.cost_model.base * tokens
        return one_by_one if rate is None else min(rate * tokens * _MAX_RATE_FACTOR, one_by_one)

    def excess_time(self, step: int, length: int, size: int, tokens: int) -> int:
        """Returns the warmup time in a step of this `length` with prompts, ns; 0 if it is no warmup step."""
        if step not in self.steps:
            return 0
        usual = self.cost_model.base + self.cost_model.per_sequence * size
        return max(length - int(usual + self.max_prompt_cost(tokens)), 0)


class StepKinds:
    """The kinds of steps that an engine has had, shared by its step logs on several threads.

    `batches`, `prompts`: size classes of the batch and of its prompt tokens. `first_step_at`: begin of its first step;
    -1 where that was not seen.
    """

    first_step_at = 0

    def __init__(self) -> None:
        self.batches: set[int] = set()
        self.prompts: set[int] = set()


class WarmupTracker:
    """Finds the warmup steps of an engine. `seen_kinds`: kinds of steps that it had before."""

    def __init__(self, seen_kinds: StepKinds | None = None) -> None:
        kinds = StepKinds() if seen_kinds is None else seen_kinds
        self._kinds, self._seen_batches, self._seen_prompts = kinds, kinds.batches, kinds.prompts
        self._early_until = 0 if self._seen_batches else EARLY_STEPS
        self._steps: frozenset[int] = frozenset()
        self._rates: dict[int, float] = {}
        self._warmup_steps: WarmupSteps | None = None
        self._is_tracking = True

    @property
    def first_step_at(self) -> int:
        """When the first step of the engine began, on any of its threads; 0 before it, -1 if it was not seen."""
        return self._kinds.first_step_at

    def add_step(self, step: int, size: int, prompt_tokens: int, at: int = 0) -> None:
        """Adds a step with `size` sequences and `prompt_tokens` tokens of prompts that began at this instant; 0 = unknown."""
        self._kinds.first_step_at = self._kinds.first_step_at or (at if step == 1 else -1)
        batch, prompts = (size - 1).bit_length(), _size_class(prompt_tokens)
        if batch in self._seen_batches and prompts in self._seen_prompts and step > self._early_until:
            return
        self._seen_batches.add(batch)
        self._seen_prompts.add(prompts)
        if self._is_tracking:
            self._steps |= {step}
            self._warmup_steps = None

    def stop_tracking(self) -> None:
        """Stops tracking after steps were lost, because a lost step may have been the first of its kind."""
        self._is_tracking = False

    def learn_prompt_costs(self, table: Any, cost_model: StepCostModel | None) -> None:
        """Estimates the cost of prompts from columns of a `StepTable`; does nothing without a cost model."""
        if cost_model is None:
            return
        step, started, ended, _, size, prompts = table
        lengths = ended[1:] - np.maximum(started[1:], ended[:-1])
        usable = (prompts[1:] > 0) & (ended[1:] > 0) & (ended[:-1] > 0) & (step[1:] - step[:-1] == 1)
        usable &= ~np.isin(step[1:], list(self._steps))
        tokens = prompts[1:][usable]
        added = lengths[usable] - cost_model.base - cost_model.per_sequence * size[1:][usable]
        sizes = np.array([_size_class(int(count)) for count in tokens], np.int64)
        rates = dict(self._rates)
        for kind, often in zip(*np.unique(sizes, return_counts=True)):
            if often >= MIN_PROMPTS:
                rate = float(np.median((added / tokens)[sizes == kind]))
                rates[int(kind)] = max(rate, 0.0)
        self._rates, self._warmup_steps = rates, None

    def get_warmup_steps(self, cost_model: StepCostModel | None) -> WarmupSteps | None:
        """Returns the warmup steps up to now; None without a cost model or without warmup steps."""
        if cost_model is None or not self._steps:
            return None
        if self._warmup_steps is None or self._warmup_steps.cost_model is not cost_model:
            self._warmup_steps = WarmupSteps(self._steps, max(self._steps), cost_model, self._rates)
        return self._warmup_steps


def _size_class(tokens: int) -> int:
    return tokens.bit_length()
