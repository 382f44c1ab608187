"""What one `generate` call comes to while it runs: its steps, when each was launched and done, what it made, and how it ended."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Mapping
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.instrumentation.transformers._integration import CANCELLED, ENGINE
from otel_infer.instrumentation.transformers.generation_arguments import shape_of
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import StepLog
from otel_infer.tracing import request_span


class Run:
    """One outermost `generate` call while it runs. `prompt`: tokens per row, 0 = not known. `first`: those that the first forward
    pass computes, of all rows."""

    def __init__(
        self, request: request_span.LiveRequest, own: bool, log: StepLog | None, rows: int, prompt: int
    ) -> None:
        self.request, self.own, self.log = request, own, log
        self.packed = request.packed
        self.rows = self.computed = rows
        self.prompt, self.start, self.limit = prompt, prompt, 0
        self.began_at = _clock.now()
        self.member = [self]
        self.stepping = self.drafting = self.prefilled = False
        self.accepted = 1
        self.pid = os.getpid()
        self.begun: Any = None
        self.device: Any = None
        self.has_waited = False
        self.cache: Any = None
        self.iterations = self.step = self.tokens = self.first = 0

    def enter(self, model: Any, input_ids: Any, given: Mapping[str, Any]) -> None:
        """A decoding loop begins, of which a loop of the user's own may run several: here the library has settled how many rows,
        from where, up to where. `given`: its arguments by name."""
        timing.drop(self.begun or 0)
        self.begun, self.iterations, self.prefilled, self.accepted = None, 0, False, 1
        config = given["generation_config"]
        self.computed, start = (int(size) for size in input_ids.shape[:2])
        if not self.stepping:  # a later loop may go on from where an earlier one came
            self.start = start
        copies, beams = (events.count(many) or 1 for many in (config.num_return_sequences, config.num_beams))
        prompts = self.computed // max(copies, beams)
        self.rows = prompts * copies
        self.prompt = self.prompt or self.start
        self.limit = events.count(config.max_length) - self.start
        if getattr(model.config, "is_encoder_decoder", False):
            self.first = self.prompt * prompts
        else:
            self.first = self._uncached(given, prompts, start) * self.computed
        # Inputs may stay on the host; of a model that is offloaded, nothing is where it says.
        device = getattr(model, "device", None)
        self.device = input_ids.device if device is None or device.type == "meta" else device
        self.stepping = True

    def _uncached(self, given: Mapping[str, Any], prompts: int, start: int) -> int:
        """Tokens per row of the prompt that are to be computed: what a cache of the user's has of them is left out by the library."""
        whole, mask = start or self.prompt, given.get("attention_mask")
        known = getattr(given["generation_config"], "_mask_length", 0)
        masked = (known,) if mask is None else shape_of(mask)[1:2]
        is_whole = masked == (start,) or given.get("inputs_embeds") is not None
        if not is_whole:  # what is cached was not given again
            return whole
        cached = min(kv_cache.tokens_of(kv_cache.among(given)), max(whole - 1, 0))
        if cached and not self.stepping:
            self.request.state(events.PrefixRead(_clock.now(), whole * prompts, cached * prompts))
        return whole - cached

    def scheduled(self, tokens: int) -> None:
        """A forward pass over all rows begins."""
        if self.log is not None:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.step = self.log.scheduled(self.member, (), column, running=1)
            self.begun = timing.begin(always=self.iterations < 2, on=self.device)

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
            kv_cache.say(self.request, self.cache)
        if goes_on and (self.iterations > 1 or not self.prefilled):
            self.scheduled(self.computed if self.iterations > 1 else self.first)

    def concludes(self, result: Any) -> None:
        """States what came of it."""
        kv_cache.say(self.request, self.cache)
        shape = shape_of(getattr(result, "sequences", result))
        made = max(shape[1] - self.start, 0) if len(shape) == 2 else 0
        tokens = made * self.rows or self.tokens
        if self.log is None or not self.stepping:
            self.request.state(events.RequestScheduled(self.began_at))
            self.request.stage("decode", self.began_at, tokens)
        # A row that ended with the last token it was allowed says the same.
        reason = "length" if 0 < self.limit <= made else "stop"
        self.request.state(events.EngineFinished(_clock.now(), reason, tokens))
        # That this was all of them is not to be seen otherwise: beams end before the last step, and a request may ask again.
        for _ in range(self.rows - 1):
            self.request.state(events.EngineFinished(_clock.now(), "", 0))
        self.request.failed("")
        if self.own:
            self.request.close()

    def fails(self, exc: BaseException) -> None:
        """States that it was given up."""
        timing.drop(self.begun or 0)
        kv_cache.say(self.request, self.cache)
        stopped = not isinstance(exc, Exception) or type(exc).__name__ == CANCELLED
        self.request.state(events.EngineFinished(_clock.now(), "abort" if stopped else "error", self.tokens))
        if self.own and stopped:
            self.request.close(events.ABORTED, "cancelled")
        elif self.own:
            self.request.close(events.ERROR, type(exc).__qualname__)
        elif not stopped:
            self.request.failed(type(exc).__qualname__)


class _Thread(threading.local):
    """What this thread generates. `begun`: what the call that it makes next is to be."""

    run: Run | None = None
    begun: Run | None = None


thread = _Thread()
