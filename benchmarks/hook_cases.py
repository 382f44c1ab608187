"""Cases of `benchmarks.hooks`, and their gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SEQUENCES = 256
UNCHANGED_NS, CHANGED_NS, DERIVED_NS, KEYFRAME_NS = 1000, 4000, 10_000, 10_000

Steps = Callable[[int], None]
"""Runs this many steps."""


class Case(NamedTuple):
    """One row: `hooked` minus `bare`. `before` prepares this many steps, outside the measured time."""

    claim: str
    gate_ns: float | None
    bare: Steps
    hooked: Steps
    before: Callable[[int], None] = lambda steps: None


def repeat_functions(*functions: Callable[[], Any]) -> Steps:
    """Returns a function that calls these one after another, `steps` times."""

    def run_steps(steps: int) -> None:
        for _ in range(steps):
            for function in functions:
                function()

    return run_steps
