"""What is learned of an engine from its steps: what they cost, what held them up, which were the first of their kind. Pure."""

from __future__ import annotations

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCosts, of_steps
from otel_infer.assembly.engine.step_table import StepTable
from otel_infer.assembly.engine.thread_delays import Strain
from otel_infer.assembly.engine.warmup import Firsts, FirstUse

FIT_FIRST, FIT_EVERY, FIT_OVER = 16, 256, 1024
"""What a step costs is estimated anew when there are twice as many steps, then every so often, from so many."""
LOOKED_OVER = 512
"""Steps among which those are found that were in a look at their thread."""


class Learned:
    """Of the engine whose steps are in `table`. `seen`: kinds of steps it had on other threads as well (`Firsts`)."""

    def __init__(self, table: StepTable, seen: set[int] | None = None) -> None:
        self.strain = Strain()
        self.firsts = Firsts(seen)
        self._table = table
        self._costs: StepCosts | None = None
        self._fit_due = FIT_FIRST

    def done(self, at: int) -> None:
        """A step ended."""
        if at >= self.strain.due:
            self.strain.settle(self._table.latest(LOOKED_OVER), self.costs())

    def settle(self) -> None:
        """Nothing more is to come of the steps that are done: what is known of the thread counts for them."""
        if self.strain.waits:
            self.strain.settle(self._table.latest(LOOKED_OVER), self.costs(), final=True)

    def costs(self) -> StepCosts | None:
        """What a step without prompts costs; the same for the same facts before it."""
        last = self._table.last
        if last >= self._fit_due:
            table = self._table.latest(FIT_OVER)
            held = sum(self.strain.counted(np.maximum(table[1, 1:], table[2, :-1]), table[2, 1:]))
            # Where each step has prompts, what those without one cost before is the best that is known.
            self._costs = of_steps(table, held) or self._costs
            self.firsts.learn(table, self._costs)
            self._fit_due = last + min(last, FIT_EVERY)
        return self._costs

    def known(self) -> tuple[StepCosts | None, FirstUse | None]:
        """What a step costs, and which were the first of their kind."""
        costs = self.costs()
        return costs, self.firsts.known(costs)
