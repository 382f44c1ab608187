"""What one `generate` call comes to while it runs: its steps, when each was launched and done, what it made, and how it ended."""

from __future__ import annotations

import os
import threading
from array import array
from typing import Any

from otel_infer import clock, facts, ingress
from otel_infer.gpu.timing import timing
from otel_infer.gpu.work import StepWork
from otel_infer.integrations.transformers import caches
from otel_infer.integrations.transformers._integration import CANCELLED, ENGINE
from otel_infer.integrations.transformers.arguments import shape_of
from otel_infer.ring.membership import StepLog


class Run:
    """One outermost `generate` call while it runs. `prompt`: tokens per row, 0 = not known."""

    def __init__(
        self, request: ingress.LiveRequest, own: bool, log: StepLog | None, rows: int, prompt: int
    ) -> None:
        self.request, self.own, self.log = request, own, log
        self.packed = request.packed
        self.rows = self.computed = rows
        self.prompt, self.start, self.limit = prompt, prompt, 0
        self.began_at = clock.now()
        self.member = [self]
        self.stepping = self.drafting = self.prefilled = False
        self.accepted = 1
        self.pid = os.getpid()
        self.begun: Any = None
        self.device: Any = None
        self.has_waited = False
        self.cache: Any = None
        self.iterations = self.step = self.tokens = 0

    def enter(self, input_ids: Any, config: Any) -> None:
        """A decoding loop begins: here the library has settled how many rows, from where, up to where."""
        self.computed, self.start = (int(size) for size in input_ids.shape[:2])
        copies, beams = config.num_return_sequences or 1, config.num_beams or 1
        self.rows = self.computed // max(copies, beams) * copies
        self.prompt = self.prompt or self.start
        self.limit = int(config.max_length or 0) - self.start
        self.device = input_ids.device
        self.stepping = True

    def scheduled(self, tokens: int) -> None:
        """A forward pass over all rows begins."""
        if self.log is not None:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.step = self.log.scheduled(self.member, (), column, running=1)
            self.begun = timing.begin(always=tokens > self.computed, on=self.device)

    def launched(self, has_waited: bool = False) -> None:
        """Whatever there is to compute for it has been launched, and maybe waited for."""
        begun, self.begun = self.begun, None
        if begun is not None and self.log is not None:
            timing.end(begun, StepWork(ENGINE, self.pid, 0, self.step, self.log.number), has_waited)

    def done(self) -> None:
        """Its tokens are known."""
        tokens = self.rows * self.accepted
        self.tokens += tokens
        if self.log is not None:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.log.done(self.step, column, 1)

    def iterate(self, goes_on: bool) -> None:
        """The loop asks whether to go on: what was running is done, and if so the next step begins."""
        self.iterations += 1
        if self.iterations > 1:
            self.done()
        if self.iterations == 2:
            caches.say(self.request, self.cache)
        if goes_on and (self.iterations > 1 or not self.prefilled):
            self.scheduled(self.computed if self.iterations > 1 else self.prompt * self.computed)

    def concludes(self, result: Any) -> None:
        """States what came of it."""
        caches.say(self.request, self.cache)
        shape = shape_of(getattr(result, "sequences", result))
        made = max(int(shape[1]) - self.start, 0) if len(shape) == 2 else 0
        tokens = made * self.rows or self.tokens
        if self.log is None or not self.stepping:
            self.request.state(facts.RequestScheduled(self.began_at))
            self.request.stage("decode", self.began_at, tokens)
        # A row that ended with the last token it was allowed says the same.
        reason = "length" if 0 < self.limit <= made else "stop"
        self.request.state(facts.EngineFinished(clock.now(), reason, tokens))
        self.request.failed("")
        if self.own:
            self.request.close()

    def fails(self, exc: BaseException) -> None:
        """States that it was given up."""
        timing.drop(self.begun or 0)
        caches.say(self.request, self.cache)
        stopped = not isinstance(exc, Exception) or type(exc).__name__ == CANCELLED
        self.request.state(facts.EngineFinished(clock.now(), "abort" if stopped else "error", self.tokens))
        if self.own and stopped:
            self.request.close(facts.ABORTED, "cancelled")
        elif self.own:
            self.request.close(facts.ERROR, type(exc).__qualname__)
        elif not stopped:
            self.request.failed(type(exc).__qualname__)


class _Thread(threading.local):
    """What this thread generates."""

    run: Run | None = None


thread = _Thread()
