"""Parses the CPU and memory budget of the sidecar (OTEL_INFER_BUDGET)."""

from __future__ import annotations

import re
from typing import NamedTuple

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_CPU, _MEMORY = re.compile(r"cpu=(\d+)%"), re.compile(r"memory=(\d+)(KiB|MiB|GiB)")


class OverheadBudget(NamedTuple):
    """The CPU and memory that the sidecar may use.

    `cpu_cores`: 1 = one whole core. `memory_bytes`: resident memory.
    """

    cpu_cores: float
    memory_bytes: int


DEFAULT_BUDGET = OverheadBudget(0.25, 256 << 20)


def parse_budget(text: str) -> OverheadBudget:
    """Returns the budget of a text like `cpu=25%,memory=256MiB`; a part that is absent has its default.

    Raises `ValueError` with the accepted syntax.
    """
    cpu, memory = DEFAULT_BUDGET
    for part in text.split(","):
        by_cpu, by_memory = _CPU.fullmatch(part.strip()), _MEMORY.fullmatch(part.strip())
        if by_cpu and int(by_cpu[1]):
            cpu = int(by_cpu[1]) / 100
        elif by_memory and int(by_memory[1]):
            memory = int(by_memory[1]) * _UNITS[by_memory[2]]
        else:
            raise ValueError(f"like cpu=25%,memory=256MiB (in KiB, MiB, GiB), not {part.strip()!r}")
    return OverheadBudget(cpu, memory)
