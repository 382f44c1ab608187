"""Keeps the reading side inside what it may take: above it, fewer step spans are made. Pure.

Requests, stages and metrics are never shed, and nothing in the server changes: what is given up is detail, and it is counted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

WINDOW_NS = 5_000_000_000
"""How long CPU is averaged before anything is decided; a burst is not a state."""
SHED, REGAINED = 0.7, 1.25
CALM = 0.8
"""Below this part of what it may take, detail comes back."""
LEAST = 0.01
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_CPU, _MEMORY = re.compile(r"cpu=(\d+)%"), re.compile(r"memory=(\d+)(KiB|MiB|GiB)")


class Allowance(NamedTuple):
    """`cpu`: of one core, 1 = all of it. `memory`: bytes."""

    cpu: float
    memory: int


DEFAULT = Allowance(0.25, 256 << 20)


def parse(text: str) -> Allowance:
    """Like `cpu=25%,memory=256MiB`; what is left out is the default. Raises `ValueError` with what is accepted."""
    cpu, memory = DEFAULT
    for part in text.split(","):
        by_cpu, by_memory = _CPU.fullmatch(part.strip()), _MEMORY.fullmatch(part.strip())
        if by_cpu and int(by_cpu[1]):
            cpu = int(by_cpu[1]) / 100
        elif by_memory and int(by_memory[1]):
            memory = int(by_memory[1]) * _UNITS[by_memory[2]]
        else:
            raise ValueError(f"like cpu=25%,memory=256MiB (in KiB, MiB, GiB), not {part.strip()!r}")
    return Allowance(cpu, memory)


class Governor:
    """Says which share of the step spans may be made, 1 = all."""

    def __init__(self, allowed: Allowance) -> None:
        self._allowed = allowed
        self._since, self._cpu_before = 0, 0
        self.share = 1.0

    def observe(self, now: int, cpu: int, memory: int) -> float:
        """`now`, and `cpu` used so far, in ns; `memory` held now, bytes. The share from now on."""
        if not self._since:
            self._since, self._cpu_before = now, cpu
        if now - self._since < WINDOW_NS:
            return self.share
        used = (cpu - self._cpu_before) / (now - self._since)
        self._since, self._cpu_before = now, cpu
        load = max(used / self._allowed.cpu, memory / self._allowed.memory)
        if load > 1:
            self.share = max(self.share * SHED, LEAST)
        elif load < CALM:
            self.share = min(self.share * REGAINED, 1.0)
        return self.share
