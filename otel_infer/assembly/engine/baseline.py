"""The baseline of one engine, learned from its steps: step cost model, thread delays, warmup steps. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel, cost_model_from_steps
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.assembly.engine.thread_delays import ThreadDelays
from otel_infer.assembly.engine.warmup import StepKinds, WarmupSteps, WarmupTracker

FIT_FIRST, FIT_EVERY, FIT_OVER = 16, 256, 1024
"""Steps before the first fit of the cost model, most steps between two fits, and steps that a fit uses.

The model is fitted again when the number of steps has doubled, at the latest after `FIT_EVERY` steps. A fit
without a result is repeated after `FIT_FIRST` steps.
"""
RESOLVE_STEPS = (64, 512)
"""Latest steps in which the steps of a thread sample are searched: more if the fewer do not reach back to it."""


class EngineBaseline:
    """The baseline of the engine whose steps are in `table`.

    `seen_kinds`: kinds of steps that the engine had before, also on its other threads (see `WarmupTracker`).
    """

    def __init__(self, table: StepTable, seen_kinds: StepKinds | None = None) -> None:
        self.thread_delays = ThreadDelays()
        self.warmup = WarmupTracker(seen_kinds)
        self._table = table
        self._cost_model: StepCostModel | None = None
        self._fit_due = FIT_FIRST

    def record_step_end(self, at: int) -> None:
        """Records that a step ended, and resolves the thread samples that are due by then."""
        if at >= self.thread_delays.due:
            self.thread_delays.resolve_samples(self._latest_steps(), self.get_cost_model())

    def resolve_pending(self, ended_at: int, final: bool) -> None:
        """Resolves pending thread samples for a request that ended at this instant, up to the last step that is done.

        `final`: all of them, because no step will get more events.
        """
        costs = self.get_cost_model()
        is_due = final and self.thread_delays.has_pending
        if is_due or self.thread_delays.concerns(ended_at, costs is not None):
            self.thread_delays.resolve_samples(self._latest_steps(), costs, final, ended_at)

    def _latest_steps(self) -> Any:
        """Returns the latest steps, as far back as the oldest pending thread sample."""
        few, many = RESOLVE_STEPS
        steps = self._table.latest_steps(few)
        reaches_back = 0 < steps[2, 0] <= self.thread_delays.pending_since
        return steps if reaches_back else self._table.latest_steps(many)

    def get_cost_model(self) -> StepCostModel | None:
        """Returns the cost of a step without prompts; None before it can be estimated.

        Fits the model again when that is due, and learns prompt costs for `warmup` from the same steps. The
        result depends only on the events before this call, so a tape gives the same one.
        """
        added = self._table.added
        if added >= self._fit_due:
            table = self._table.latest_steps(FIT_OVER)
            delays = sum(
                self.thread_delays.delays_in_intervals(np.maximum(table[1, 1:], table[2, :-1]), table[2, 1:])
            )
            # Where every recent step has prompts, the previous model is the best estimate.
            self._cost_model = cost_model_from_steps(table, delays) or self._cost_model
            self.warmup.learn_prompt_costs(table, self._cost_model)
            wait = FIT_FIRST if self._cost_model is None else min(added, FIT_EVERY)
            self._fit_due = added + wait
        return self._cost_model

    def get_model_and_warmup(self) -> tuple[StepCostModel | None, WarmupSteps | None]:
        """Returns the step cost model and the warmup steps; None where unknown."""
        cost_model = self.get_cost_model()
        return cost_model, self.warmup.get_warmup_steps(cost_model)
