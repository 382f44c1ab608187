"""A simulated server: continuous batching without a model, knowing nothing of otel_infer.

The engine's step is Python under the GIL (the scheduler's bookkeeping, then a loop over all sequences) and a wait without
it, as the wait for a GPU is. The loop makes no objects: where it did, a single int that anybody kept once a step made it
1 % slower or faster, by which of the allocator's pools came first. One sequence finishes and one is admitted in every
step. The engine keeps its batch in one list of its own, changed in place, and says in a dict how many tokens each member
is scheduled for. Requests arrive and are answered in another thread, the front, with JSON in and out, as in every server.
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
"""A core that begins to work comes to its pace after about a second, and others slow it down for seconds."""
WAIT_TURNS = 200
"""Of `forward`, some 100 µs, between two looks at the clock."""
MESSAGES = [{"role": "user", "content": "Why is the sky blue, and since when? " * 16} for _ in range(4)]
BODY = json.dumps({"model": "simulated", "stream": True, "messages": MESSAGES})


class Sequence:
    """One token stream. `first` and `last` are the steps it was in; `live` is for whoever watches the server."""

    __slots__ = ("first", "last", "live", "output", "packed", "words")

    def __init__(self, words: int = 0) -> None:
        self.words = words
        self.output: list[int] = []
        self.first = self.last = 0
        self.live: Any = None
        self.packed = b""


class Engine:
    """`python_us` and `wait_us`: µs a step; the wait holds a core as a spinning driver would, and no GIL."""

    def __init__(self, size: int = 256, python_us: float = 1500.0, wait_us: float = 3500.0) -> None:
        self.size = size
        self.churning = True
        self.steps = 0
        self.running = [Sequence() for _ in range(size)]
        self.arrivals = deque(Sequence() for _ in range(WAITING))
        self.admitted: list[Sequence] = []
        self.answered: list[tuple[int, int]] = []
        self.scheduled_tokens: dict[Sequence, int] = {}
        self.total_tokens = 0
        self._outbox: SimpleQueue[Sequence] = SimpleQueue()
        self._inner = _fitted(self._work, python_us) if python_us else 0
        self._iterations = _fitted(forward, wait_us) if wait_us else 0
        threading.Thread(target=self._front, name="front", daemon=True).start()

    # ── the engine's thread ──────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """One forward over the batch."""
        self.schedule()
        if self._iterations:
            forward(self._iterations)
        self.update()

    def schedule(self) -> list[Sequence]:
        """Composes the next batch and returns it: the engine's own list."""
        self.steps += 1
        running, arrivals = self.running, self.arrivals
        self.admitted = []
        while arrivals and len(running) < self.size:
            sequence = arrivals.popleft()
            sequence.first = self.steps
            running.append(sequence)
            self.admitted.append(sequence)
        self.scheduled_tokens = tokens = dict.fromkeys(running, 1)
        for sequence in self.admitted:
            tokens[sequence] = PROMPT
        self.total_tokens = len(running) + (PROMPT - 1) * len(self.admitted)
        return running

    def update(self) -> Sequence | None:
        """Gives every member its token; the oldest is done, and returned, unless nobody is to come and go."""
        self._work(self._inner)
        if not self.churning:
            return None
        finished = self.running.pop(0)
        finished.last = self.steps
        self._outbox.put(finished)
        return finished

    # ── the front's thread ───────────────────────────────────────────────────────────────────────────────────────

    def admit(self) -> Sequence:
        """A request arrives: its body is parsed and split, which is less than any web framework does."""
        messages = json.loads(BODY)["messages"]
        words = [word.lower() for message in messages for word in message["content"].split()]
        return Sequence(len(words))

    def answer(self, sequence: Sequence) -> None:
        """A request's last byte is handed over, in pieces; what remains of it is the steps it was in."""
        for piece in sequence.output:
            json.dumps({"choices": [{"index": 0, "delta": {"content": f" {piece}"}}]}).encode()
        self.answered.append((sequence.first, sequence.last))

    def settle(self) -> None:
        """Waits until the front has nothing to do; the engine does not step meanwhile."""
        while len(self.arrivals) + len(self.running) < self.size + WAITING:
            time.sleep(0.001)

    def _front(self) -> None:
        while True:
            finished = self._outbox.get()
            self.answer(finished)
            self.arrivals.append(self.admit())

    def _work(self, inner: int) -> None:
        for sequence in self.running:
            token = 0
            for _ in repeat(None, inner):
                token = (token ^ 3) & 7
            sequence.output.append(token)
            if len(sequence.output) > 64:
                sequence.output.clear()


def forward(iterations: int) -> None:
    """A wait that keeps the core awake: nothing but arithmetic in C, which gives the GIL away and touches no memory."""
    hashlib.pbkdf2_hmac("sha256", b"benchmark", b"benchmark", iterations)


def at_pace(count: int, pause: float) -> Iterator[None]:
    """So many times, so many seconds apart; who falls behind does not catch up. It waits without the GIL, and without the core
    falling asleep."""
    due = time.perf_counter()
    for _ in range(count):
        yield
        due = max(due + pause, time.perf_counter() - pause)
        while time.perf_counter() < due:
            forward(WAIT_TURNS)


def _fitted(work: Any, wanted_us: float) -> int:
    """How much of `work` takes so many µs of CPU where nothing disturbs it, on a core that has been busy for a while."""
    amount = 8
    while (taken := min(_timed(work, amount) for _ in range(TRIALS))) < wanted_us / 4:
        amount *= 2
    until = time.monotonic() + FITTING_S
    while time.monotonic() < until:
        taken = min(taken, _timed(work, amount))
    return max(1, int(amount * wanted_us / taken))


def _timed(work: Any, amount: int) -> float:
    began = time.thread_time_ns()
    work(amount)
    return (time.thread_time_ns() - began) / 1000
