"""`model.generate`: one request, in the caller's thread.

    generate ─▶ (encoder) ─▶ _prefill ─▶ loop: _has_unfinished_sequences ─▶ forward, select ─▶ …
    submitted   scheduled                       done, scheduled

`_has_unfinished_sequences` is asked once per iteration of greedy, sampling, beam search and assisted decoding, between
two steps. In the n-th iteration the tokens of the (n−1)-th are known on the host. All rows of a batch are one request.
Scheduled are the rows that are computed (every beam), delivered those that are returned; rows that finished early, or
that were padded on the left, count in full, since only the device knows which. A loop of the user's own is one `decode`
without steps. A `generate` inside a `generate`, as a draft model's, is part of it.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any

from otel_infer import clock, facts, ingress
from otel_infer.gpu.timing import timing
from otel_infer.gpu.work import StepWork
from otel_infer.integrations._claims import claiming
from otel_infer.integrations.transformers import caches
from otel_infer.integrations.transformers._integration import (
    CANCELLED,
    ENGINE,
    handed_over,
    integration,
    name_request,
    own_request,
)
from otel_infer.integrations.transformers.arguments import setting, shape_of, shape_of_prompt
from otel_infer.patching import Call, Hook
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

_GENERATION = "transformers.generation.utils:GenerationMixin"
OPERATION = "text_completion"
LOOPS = ("_sample", "_beam_search", "_assisted_decoding")
ENCODERS = ("_prepare_encoder_decoder_kwargs_for_generation", "_maybe_prepare_encoder_kwargs_for_generation")

_packed_of = attrgetter("packed")


class _Run:
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

    run: _Run | None = None


thread = _Thread()


@integration.around(f"{_GENERATION}.generate", reads=("inputs", "generation_config"), part="generate")
def generate(call: Call) -> Generator[None, Any, None]:
    outer, thread.run = thread.run, None
    run = None if outer is not None or _is_paged(call) else _begin(call)
    if run is None:  # a draft model's calls are inside the outer decode
        try:
            yield
        finally:
            thread.run = outer
        return
    thread.run = run
    token = run.request.attach() if run.own else None  # a plain function, so it ends where it began
    try:
        result = yield
        run.concludes(result)
    except BaseException as exc:
        run.fails(exc)
        raise
    finally:
        # A run is in a cycle with itself, and a device's memory cannot wait for the garbage collector.
        thread.run = run.cache = None
        if token is not None:
            ingress.detach(token)
        if run.log is not None:
            recorder.give_back(ENGINE, run.log)


integration.step_hook(f"{_GENERATION}.generate", part="generate")(claiming)


def _is_paged(call: Call) -> bool:
    """Whether the library turns this into continuous batching."""
    return bool(call.kwargs.get("cache_implementation") == "paged")


def _begin(call: Call) -> _Run | None:
    request = ingress.current()
    own = request is None
    request = request or own_request(OPERATION, call.instance)
    if request is None:
        return None
    rows, prompt = shape_of_prompt(call)
    sequences = rows * int(setting(call, "num_return_sequences") or 1)
    if not own:
        name_request(request, OPERATION, call.instance)
    if own or not handed_over.get():
        request.submitted(ENGINE, sequences, prompt * rows, int(setting(call, "max_new_tokens") or 0))
    handed_over.set(False)
    log = recorder.step_log(ENGINE)
    if log is not None:
        log.pack = _pack
    return _Run(request, own, log, rows, prompt)


def _pack(runs: Any) -> bytes:
    return b"".join(map(_packed_of, runs))


def _loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def loop(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and hook.alive:
            try:
                run.enter(input_ids, kwargs["generation_config"])
                run.drafting = hook.target.endswith("._assisted_decoding")
                # These ask the device for tokens or scores before they ask whether to go on.
                run.has_waited = not hook.target.endswith("._sample") or kwargs.get("streamer") is not None
            except Exception as exc:
                hook.fail(exc)
        return original(self, input_ids, *args, **kwargs)

    return loop


for _name in LOOPS:
    integration.step_hook(
        f"{_GENERATION}.{_name}", reads=("input_ids", "generation_config"), part="generate"
    )(_loop)


@integration.step_hook(
    f"{_GENERATION}._update_model_kwargs_for_generation", reads=("num_new_tokens",), part="generate"
)
def accept(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Assisted decoding says here how many tokens of its draft were right, and the one beyond; every loop, where its cache is."""

    def accept(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.drafting and hook.alive:
            try:
                run.accepted = int(kwargs.get("num_new_tokens", 1))
            except Exception as exc:
                hook.fail(exc)
        result = original(*args, **kwargs)
        if run is not None and hook.alive and type(result) is dict:
            run.cache = result.get("past_key_values")
        return result

    return accept


def _encoding(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """An encoder takes the prompt: that is prefill, and no waiting."""

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and hook.alive:
            try:
                if self.config.is_encoder_decoder:
                    run.request.state(facts.RequestScheduled(clock.now()))
            except Exception as exc:
                hook.fail(exc)
        return original(self, *args, **kwargs)

    return encode


for _name in ENCODERS:
    integration.step_hook(f"{_GENERATION}.{_name}", optional=True, part="generate")(_encoding)


@integration.step_hook(f"{_GENERATION}._prefill", optional=True, part="generate")
def prefill(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def prefill(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.stepping and hook.alive:
            try:
                run.prefilled = True
                run.scheduled(run.prompt * run.computed)
            except Exception as exc:
                hook.fail(exc)
        return original(*args, **kwargs)

    return prefill


@integration.step_hook("transformers.generation.utils:StopCheck.__call__", optional=True, part="generate")
def stop_check(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """From 5.17 on, what a streamer is given and whether to go on is waited for here."""

    def check(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.begun is not None and hook.alive:
            try:
                run.launched()
            except Exception as exc:
                hook.fail(exc)
        return original(*args, **kwargs)

    return check


@integration.step_hook(f"{_GENERATION}._has_unfinished_sequences", part="generate")
def has_unfinished_sequences(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def has_unfinished_sequences(*args: Any, **kwargs: Any) -> Any:
        run = thread.run
        if run is not None and run.begun is not None and hook.alive:
            try:
                run.launched(run.has_waited)  # this function waits for the device
            except Exception as exc:
                hook.fail(exc)
        result = original(*args, **kwargs)
        if run is not None and run.stepping and hook.alive:
            try:
                run.iterate(bool(result))
            except Exception as exc:
                hook.fail(exc)
        return result

    return has_unfinished_sequences
