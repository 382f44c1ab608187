"""A simulated engine: continuous batching without a model, knowing nothing of otel_infer.

A step is Python under the GIL (the scheduler's bookkeeping, then a loop over all sequences) and a wait without it, as the
wait for a GPU is. One sequence finishes and one is admitted in every step. It keeps its batch in one list of its own,
which it changes in place, and says in a dict how many tokens each member is scheduled for.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

PROMPT = 64


class Sequence:
    """One token stream. `live` is for whoever watches the engine."""

    __slots__ = ("live", "output", "packed")

    def __init__(self) -> None:
        self.output: list[int] = []
        self.live: Any = None
        self.packed = b""


class Engine:
    """`python_us` and `wait_us`: µs a step; the wait holds a core as a spinning driver would, and no GIL."""

    def __init__(self, size: int = 256, python_us: float = 1500.0, wait_us: float = 3500.0) -> None:
        self.size = size
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.scheduled_tokens: dict[Sequence, int] = {}
        self.total_tokens = 0
        self._inner = self._iterations = 0
        self._fill()
        if python_us:
            self._inner = _fitted(self._calibrate_work, python_us)
        if wait_us:
            self._iterations = _fitted(self._calibrate_wait, wait_us)

    def step(self) -> None:
        """One forward over the batch."""
        self.schedule()
        self.wait()
        self.update()

    def schedule(self) -> list[Sequence]:
        """Composes the next batch and returns it: the engine's own list."""
        running = self.running
        self.admitted = [self.admit() for _ in range(self.size - len(running))]
        running.extend(self.admitted)
        self.scheduled_tokens = tokens = dict.fromkeys(running, 1)
        for sequence in self.admitted:
            tokens[sequence] = PROMPT
        self.total_tokens = len(running) + (PROMPT - 1) * len(self.admitted)
        return running

    def admit(self) -> Sequence:
        """A request arrives."""
        return Sequence()

    def wait(self) -> None:
        """The forward: nothing but arithmetic in C, which gives the GIL away and touches no memory."""
        if self._iterations:
            hashlib.pbkdf2_hmac("sha256", b"benchmark", b"benchmark", self._iterations)

    def update(self) -> list[Sequence]:
        """Gives every member its token; returns who is done."""
        self._work(self._inner)
        self.finished = [self.running.pop(0)]
        return self.finished

    def _work(self, inner: int) -> None:
        for sequence in self.running:
            total = 0
            for i in range(inner):
                total += (i * 7) & 3
            sequence.output.append(total)
            if len(sequence.output) > 64:
                sequence.output.clear()

    def _fill(self) -> None:
        self.running.extend(Sequence() for _ in range(self.size))

    def _calibrate_work(self, inner: int) -> None:
        self._work(inner)

    def _calibrate_wait(self, iterations: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"benchmark", b"benchmark", iterations)


def _fitted(work: Any, wanted_us: float) -> int:
    """How much of `work` takes so many µs of CPU."""
    amount = 16
    while True:
        best = min(_timed(work, amount) for _ in range(5))
        if best > wanted_us / 4:
            return max(1, int(amount * wanted_us / best))
        amount *= 2


def _timed(work: Any, amount: int) -> float:
    began = time.thread_time_ns()
    work(amount)
    return (time.thread_time_ns() - began) / 1000
