"""The form of a case of `benchmarks.hooks`, its gates, and how a case is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SEQUENCES = 256


UNCHANGED_NS, CHANGED_NS, DERIVED_NS, KEYFRAME_NS = 1000, 4000, 10_000, 10_000


Steps = Callable[[int], None]
"""Runs so many steps."""


class Case(NamedTuple):
    """One row: `hooked` against `bare`. `before` gets ready for so many steps, outside the time that is measured."""

    claim: str
    gate_ns: float | None
    bare: Steps
    hooked: Steps
    before: Callable[[int], None] = lambda steps: None


def repeated(*functions: Callable[[], Any]) -> Steps:
    """Calls these one after another, so many times."""

    def run(steps: int) -> None:
        for _ in range(steps):
            for function in functions:
                function()

    return run
