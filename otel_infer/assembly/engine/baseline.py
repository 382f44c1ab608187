"""What is learned of an engine from its steps: what they cost, what held them up, which were the first of their kind. Pure."""

from __future__ import annotations

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel, cost_model_from_steps
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.assembly.engine.thread_delays import ThreadDelays
from otel_infer.assembly.engine.warmup import WarmupSteps, WarmupTracker

FIT_FIRST, FIT_EVERY, FIT_OVER = 16, 256, 1024
"""What a step costs is estimated anew when there are twice as many steps, then every so often, from so many."""
RESOLVE_STEPS = 512
"""Steps among which those are found that were in a look at their thread."""


class EngineBaseline:
    """Of the engine whose steps are in `table`. `seen`: kinds of steps it had on other threads as well (`Firsts`)."""

    def __init__(self, table: StepTable, seen: set[int] | None = None) -> None:
        self.thread_delays = ThreadDelays()
        self.warmup = WarmupTracker(seen)
        self._table = table
        self._cost_model: StepCostModel | None = None
        self._fit_due = FIT_FIRST

    def record_step_end(self, at: int) -> None:
        """A step ended."""
        if at >= self.thread_delays.due:
            self.thread_delays.resolve_samples(self._table.latest_steps(RESOLVE_STEPS), self.get_cost_model())

    def resolve_pending(self) -> None:
        """Nothing more is to come of the steps that are done: what is known of the thread counts for them."""
        if self.thread_delays.has_pending:
            self.thread_delays.resolve_samples(
                self._table.latest_steps(RESOLVE_STEPS), self.get_cost_model(), final=True
            )

    def get_cost_model(self) -> StepCostModel | None:
        """What a step without prompts costs; the same for the same facts before it."""
        last = self._table.last
        if last >= self._fit_due:
            table = self._table.latest_steps(FIT_OVER)
            held = sum(
                self.thread_delays.delays_in_intervals(np.maximum(table[1, 1:], table[2, :-1]), table[2, 1:])
            )
            # Where each step has prompts, what those without one cost before is the best that is known.
            self._cost_model = cost_model_from_steps(table, held) or self._cost_model
            self.warmup.learn_prompt_costs(table, self._cost_model)
            self._fit_due = last + min(last, FIT_EVERY)
        return self._cost_model

    def get_model_and_warmup(self) -> tuple[StepCostModel | None, WarmupSteps | None]:
        """What a step costs, and which were the first of their kind."""
        costs = self.get_cost_model()
        return costs, self.warmup.get_warmup_steps(costs)
