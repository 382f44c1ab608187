"""A simulated server with continuous batching and without a model. It does not import otel_infer.

A step is Python under the GIL (the scheduler, then a loop over all sequences) and a wait without the GIL, as for a GPU. The loop
creates no objects: otherwise one extra int per step would change its speed by 1 %, through the allocator's pools. One sequence
finishes and one is admitted in every step. The batch is one list, changed in place. Requests arrive and are answered in another
thread, the front, with JSON in and out.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from queue import SimpleQueue
from typing import Any

PROMPT = 64
WAITING = 2
TRIALS = 5
FITTING_S = 4.0
"""A core reaches its pace about a second after it became busy, and other machines slow it down for seconds."""
WAIT_TURNS = 200
"""Turns of `run_forward` between two looks at the clock, about 100 µs."""
MESSAGES = [{"role": "user", "content": "Why is the sky blue, and since when? " * 16} for _ in range(4)]
BODY = json.dumps({"model": "simulated", "stream": True, "messages": MESSAGES})


class Sequence:
    """One token stream. `first` and `last` are the numbers of its steps; `live` and `packed` belong to the instrumentation."""

    __slots__ = ("first", "last", "live", "output", "packed", "words")

    def __init__(self, words: int = 0) -> None:
        self.words = words
        self.output: list[int] = []
        self.first = self.last = 0
        self.live: Any = None
        self.packed = b""


class Engine:
    """`python_us` and `wait_us`: µs per step. The wait holds a core, as a spinning driver does, and not the GIL."""

    def __init__(self, size: int = 256, python_us: float = 1500.0, wait_us: float = 3500.0) -> None:
        self.size = size
        self.churning = True
        self.steps = 0
        self.running = [Sequence() for _ in range(size)]
        self.arrivals = deque(Sequence() for _ in range(WAITING))
        self.admitted: list[Sequence] = []
        self.answered: list[tuple[int, int]] = []
        self.total_tokens = 0
        self._outbox: SimpleQueue[Sequence] = SimpleQueue()
        self._inner = _fit_work(self._compute_tokens, python_us) if python_us else 0
        self._iterations = _fit_work(run_forward, wait_us) if wait_us else 0
        threading.Thread(target=self._run_front, name="front", daemon=True).start()

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def run_step(self) -> None:
        """Runs one forward over the batch."""
        self.schedule_batch()
        if self._iterations:
            run_forward(self._iterations)
        self.update_batch()

    def schedule_batch(self) -> list[Sequence]:
        """Returns the next batch: the engine's own list."""
        self.steps += 1
        running, arrivals = self.running, self.arrivals
        self.admitted = []
        while arrivals and len(running) < self.size:
            sequence = arrivals.popleft()
            sequence.first = self.steps
            running.append(sequence)
            self.admitted.append(sequence)
        self.total_tokens = len(running) + (PROMPT - 1) * len(self.admitted)
        return running

    def update_batch(self) -> Sequence | None:
        """Gives each sequence its token. Returns the oldest one, which is finished; None without `churning`."""
        self._compute_tokens(self._inner)
        if not self.churning:
            return None
        finished = self.running.pop(0)
        finished.last = self.steps
        self._outbox.put(finished)
        return finished

    # ── the front's thread ───────────────────────────────────────────────────────────────────────────────────────

    def admit_request(self) -> Sequence:
        """Parses the body of a request, which is less work than in any web framework."""
        messages = json.loads(BODY)["messages"]
        words = [word.lower() for message in messages for word in message["content"].split()]
        return Sequence(len(words))

    def answer_request(self, sequence: Sequence) -> None:
        """Encodes the answer in pieces, and keeps the numbers of its steps."""
        for piece in sequence.output:
            json.dumps({"choices": [{"index": 0, "delta": {"content": f" {piece}"}}]}).encode()
        self.answered.append((sequence.first, sequence.last))

    def wait_for_front(self) -> None:
        """Waits until the front is idle; no step may run meanwhile."""
        while len(self.arrivals) + len(self.running) < self.size + WAITING:
            time.sleep(0.001)

    def _run_front(self) -> None:
        while True:
            finished = self._outbox.get()
            self.answer_request(finished)
            self.arrivals.append(self.admit_request())

    def _compute_tokens(self, inner: int) -> None:
        for sequence in self.running:
            token = 0
            for _ in repeat(None, inner):
                token = (token ^ 3) & 7
            sequence.output.append(token)
            if len(sequence.output) > 64:
                sequence.output.clear()


def run_forward(iterations: int) -> None:
    """Keeps the core awake with arithmetic in C, which releases the GIL and touches no memory."""
    hashlib.pbkdf2_hmac("sha256", b"benchmark", b"benchmark", iterations)


def iterate_at_pace(count: int, pause: float) -> Iterator[None]:
    """Yields `count` times, `pause` s apart, without catching up on delays. It waits without the GIL, and keeps the core awake."""
    due = time.perf_counter()
    for _ in range(count):
        yield
        due = max(due + pause, time.perf_counter() - pause)
        while time.perf_counter() < due:
            run_forward(WAIT_TURNS)


def _fit_work(work: Any, wanted_us: float) -> int:
    """Returns the amount of `work` that takes this CPU time (µs), undisturbed on a busy core."""
    amount = 8
    while (taken := min(_time_work(work, amount) for _ in range(TRIALS))) < wanted_us / 4:
        amount *= 2
    until = time.monotonic() + FITTING_S
    while time.monotonic() < until:
        taken = min(taken, _time_work(work, amount))
    return max(1, int(amount * wanted_us / taken))


def _time_work(work: Any, amount: int) -> float:
    began = time.thread_time_ns()
    work(amount)
    return (time.thread_time_ns() - began) / 1000
