"""`model.generate`: one request, in the caller's thread.

    generate ─▶ _prefill ─▶ loop: _has_unfinished_sequences ─▶ forward, select ─▶ …
    submitted   scheduled          done, scheduled

`_has_unfinished_sequences` is asked once per iteration of greedy, sampling and beam search, between two steps. In the
n-th iteration the token of the (n−1)-th is known on the host. All rows of a batch are one request; a step's tokens are
its rows (rows that finished early are padded by the library, and only the device knows which). Assisted decoding and
whatever else has a loop of its own is one `decode` without steps. A `generate` inside a `generate` is part of it.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Generator
from typing import Any

from otel_infer import clock, facts, ingress
from otel_infer.integrations._claims import claiming
from otel_infer.integrations.transformers._integration import ENGINE, integration, name_request, own_request
from otel_infer.patching import Call, Hook
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

_GENERATION = "transformers.generation.utils:GenerationMixin"
OPERATION = "text_completion"
LOOPS = ("_sample", "_beam_search")


class _Run:
    """One outermost `generate` call while it runs."""

    def __init__(self, request: ingress.LiveRequest, own: bool, log: StepLog | None, prompt: int, rows: int) -> None:
        self.request, self.own, self.log = request, own, log
        self.prompt, self.rows = prompt, rows
        self.began_at = clock.now()
        self.member = [self]
        self.stepping = self.prefilled = False
        self.iterations = self.step = self.tokens = 0

    def scheduled(self, tokens: int) -> None:
        """A forward pass over all rows begins."""
        if self.log is not None:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.step = self.log.scheduled(self.member, (), column, running=1)

    def done(self) -> None:
        """Its tokens are known."""
        self.tokens += self.rows
        if self.log is not None:
            column = b"" if self.rows == 1 else array("I", (self.rows,)).tobytes()
            self.log.done(self.step, column, 1)

    def iterate(self, goes_on: bool) -> None:
        """The loop asks whether to go on: what was running is done, and if so the next step begins."""
        self.iterations += 1
        if self.iterations > 1:
            self.done()
        if goes_on and (self.iterations > 1 or not self.prefilled):
            self.scheduled(self.rows if self.iterations > 1 else self.prompt * self.rows)


class _Thread(threading.local):
    run: _Run | None = None


_thread = _Thread()


@integration.around(f"{_GENERATION}.generate", reads=("inputs", "generation_config"), part="generate")
def generate(call: Call) -> Generator[None, Any, None]:
    outer = _thread.run
    if outer is not None:
        _thread.run = None  # a draft model's calls are inside the outer decode
        try:
            yield
        finally:
            _thread.run = outer
        return
    run = _begin(call)
    if run is None:
        yield
        return
    _thread.run = run
    try:
        result = yield
        _finish(run, result)
    except BaseException as exc:
        _fail(run, exc)
        raise
    finally:
        _thread.run = None
        if run.log is not None:
            recorder.give_back(ENGINE, run.log)


integration.step_hook(f"{_GENERATION}.generate", part="generate")(claiming)


def _begin(call: Call) -> _Run | None:
    request = ingress.current()
    own = request is None
    request = request or own_request(OPERATION, call.instance)
    if request is None:
        return None
    rows, prompt = _shape(call)
    config = call["generation_config"]
    limit = call.kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 0
    copies = call.kwargs.get("num_return_sequences") or getattr(config, "num_return_sequences", None) or 1
    rows *= int(copies)
    if not own:
        name_request(request, OPERATION, call.instance)
    if not request.engine:
        request.submitted(ENGINE, rows, prompt * rows, int(limit))
    log = recorder.step_log(ENGINE)
    run = _Run(request, own, log, prompt, rows)
    if log is not None:
        log.handles.bind(run, request.handle)
    return run


def _shape(call: Call) -> tuple[int, int]:
    """(rows, tokens per row) of the prompt."""
    inputs = call["inputs"]
    for candidate in (inputs, call.kwargs.get("input_ids"), call.kwargs.get("inputs_embeds")):
        shape = getattr(candidate, "shape", None)
        if shape is not None and len(shape) >= 2:
            return int(shape[0]), int(shape[1])
    return 1, 0


def _finish(run: _Run, result: Any) -> None:
    sequences = getattr(result, "sequences", result)
    shape = getattr(sequences, "shape", None)
    tokens = run.tokens
    if not tokens and shape is not None and len(shape) == 2:
        tokens = max(int(shape[1]) - run.prompt, 0) * run.rows
    if not run.stepping:
        run.request.state(facts.RequestScheduled(run.began_at))
        run.request.stage("decode", run.began_at, tokens)
    run.request.state(facts.EngineFinished(clock.now(), "stop", tokens))
    if run.own:
        run.request.close()


def _fail(run: _Run, exc: BaseException) -> None:
    stopped = isinstance(exc, GeneratorExit) or type(exc).__name__ == "_GenerationCancelled"
    run.request.state(facts.EngineFinished(clock.now(), "abort" if stopped else "error", run.tokens))
    if run.own:
        if stopped:
            run.request.close(facts.ABORTED, "cancelled")
        else:
            run.request.close(facts.ERROR, type(exc).__qualname__)


def _loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def loop(*args: Any, **kwargs: Any) -> Any:
        if _thread.run is not None:
            _thread.run.stepping = True
        return original(*args, **kwargs)

    return loop


for _name in LOOPS:
    integration.step_hook(f"{_GENERATION}.{_name}", part="generate")(_loop)


@integration.step_hook(f"{_GENERATION}._prefill", optional=True, part="generate")
def prefill(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def prefill(*args: Any, **kwargs: Any) -> Any:
        run = _thread.run
        if run is not None and run.stepping and hook.alive:
            try:
                run.prefilled = True
                run.scheduled(run.prompt * run.rows)
            except Exception as exc:
                hook.fail(exc)
        return original(*args, **kwargs)

    return prefill


@integration.step_hook(f"{_GENERATION}._has_unfinished_sequences", part="generate")
def has_unfinished_sequences(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def has_unfinished_sequences(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        run = _thread.run
        if run is not None and run.stepping and hook.alive:
            try:
                run.iterate(bool(result))
            except Exception as exc:
                hook.fail(exc)
        return result

    return has_unfinished_sequences


@integration.step_hook("transformers.generation.streamers:TextStreamer.put", part="streamers")
def put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A streamer turns tokens into text in the generating thread; its first `put` is the prompt."""

    def put(self: Any, value: Any) -> Any:
        run = _thread.run
        if run is None or not hook.alive:
            return original(self, value)
        started_at = clock.now()
        result = original(self, value)
        run.request.detokenize_ns += clock.now() - started_at
        if run.iterations:
            run.request.token_reached()
        return result

    return put
