"""Records onnxruntime-genai: a `Generator` whose caller asks for each token, and an `Engine` that computes several requests.

    Model(path) ─▶ phase `weights`      Generator ─ append_tokens ─ generate_next_token ─▶ a step ─ … ─ is_done, or dropped ─▶ end
    Engine.create_request ─ Request.begin_turn ─▶ submitted       Engine.run ─▶ a step of all turns; its events tell who got a token

The prompt is computed by `append_tokens`, so the first step begins there. Read and run: 0.18.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.generation_calls import Generation, SharedSteps, begin_generation
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import LoadedNames
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_tokens, wrap_tokenizer
from otel_infer.ringbuffer import events

PROVIDER = events.ONNXRUNTIME_GENAI
_MODULE = "onnxruntime_genai.onnxruntime_genai"

instrumentor = Instrumentor("onnxruntime_genai", "onnxruntime-genai", ("onnxruntime_genai",), is_engine=True)

_names = LoadedNames(PROVIDER)
LIBRARY = ModelLibrary(PROVIDER, _names.read_name, events.OPERATION_TEXT_COMPLETION)


# ── a generator ──────────────────────────────────────────────────────────────────────────────────────────────────────

_generations: weakref.WeakKeyDictionary[Any, Generation] = weakref.WeakKeyDictionary()
"""Generations of the generators that have a prompt."""


def _begin_prompt(generator: Any, tokens: Any, hook: Hook) -> Generation | None:
    """Begins the generation with its first prompt, and returns it; a later prompt continues it."""
    generation, count = _generations.get(generator), count_tokens(tokens)
    if generation is None or generation.is_ended:
        generation = begin_generation(LIBRARY, generator, hook, count)
        if generation is None:
            return None
        _generations[generator] = generation
        weakref.finalize(generator, call_safely, hook, generation.finish).atexit = False
    generation.begin_step(count)
    return generation


def _patch_append(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def append_tokens(self: Any, tokens: Any) -> None:
        generation = call_safely(hook, _begin_prompt, self, tokens, hook) if hook.alive else None
        try:
            original(self, tokens)
        except BaseException as exc:
            if generation is not None:
                call_safely(hook, generation.fail, exc)
            raise

    return append_tokens


def _patch_next(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate_next_token(self: Any) -> None:
        generation = _generations.get(self) if hook.alive else None
        if generation is None or generation.is_ended:
            original(self)
            return
        if not generation.step:
            call_safely(hook, generation.begin_step)
        try:
            original(self)
        except BaseException as exc:
            call_safely(hook, generation.fail, exc)
            raise
        call_safely(hook, generation.end_step)

    return generate_next_token


def _patch_done(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def is_done(self: Any) -> Any:
        done = original(self)
        generation = _generations.get(self) if done and hook.alive else None
        if generation is not None:
            call_safely(hook, generation.finish)
        return done

    return is_done


# ── an engine ────────────────────────────────────────────────────────────────────────────────────────────────────────


class EngineTurns:
    """The turns that an engine computes, by the id of their request. `left`: prompt tokens that are not computed yet."""

    def __init__(self) -> None:
        self.steps = SharedSteps(LIBRARY)
        self.turns: dict[int, Generation] = {}
        self.left: dict[int, int] = {}

    def begin(self, request: Any, tokens: Any, hook: Hook) -> None:
        """Begins a turn, which waits for the engine from now on."""
        count = count_tokens(tokens)
        turn = begin_generation(LIBRARY, request, hook, count, has_own_steps=False)
        if turn is not None:
            self.turns[id(request)], self.left[id(request)] = turn, count

    def begin_step(self) -> None:
        self.steps.begin_step(list(self.turns.values()), [self.left.get(key) or 1 for key in self.turns])

    def end_step(self, found: Any) -> None:
        """Ends the step with the engine's events, some of which end their turn."""
        delivered = dict.fromkeys(self.turns, 0)
        ended: list[tuple[int, Any]] = []
        for event in found:
            key = id(event.request)
            if key in delivered:
                delivered[key] += 1
                self.left[key] = 0
                if event.finish_reason.name != "NONE":
                    ended.append((key, event))
        self.steps.end_step(list(delivered.values()))
        for key, event in ended:
            self._end(key, event)
        if not self.turns:
            self.steps.release()

    def _end(self, key: int, event: Any) -> None:
        turn = self.turns.pop(key)
        cached = int(event.usage.cached_prompt_tokens)
        if cached:
            prompt = int(event.usage.prompt_tokens)
            turn.request.record_event(events.PrefixRead(_clock.now(), prompt, cached))
        turn.tokens = int(event.usage.generated_tokens)
        turn.finish("length" if event.finish_reason.name.startswith("MAX") else "stop")

    def leave(self, request: Any) -> None:
        """Ends a turn that is cancelled."""
        turn = self.turns.pop(id(request), None)
        if turn is not None:
            turn.fail(GeneratorExit())

    def fail(self, exc: BaseException) -> None:
        """Ends all turns, because the engine failed."""
        while self.turns:
            self.turns.popitem()[1].fail(exc)
        self.steps.release()


_engines: weakref.WeakKeyDictionary[Any, EngineTurns] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Any, EngineTurns] = weakref.WeakKeyDictionary()
"""The turns of an engine, by the engine and by each of its requests."""


def _note_request(engine: Any, request: Any) -> None:
    known = _engines.get(engine)
    if known is None:
        known = _engines[engine] = EngineTurns()
    _turns[request] = known
    _names.copy_name(request, engine)


def _patch_create(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _note_request, self, request)
        return request

    return create_request


def _patch_turn(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def begin_turn(self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, tokens, *args, **kwargs)
        known = _turns.get(self) if hook.alive else None
        if known is not None:
            call_safely(hook, known.begin, self, tokens, hook)
        return result

    return begin_turn


def _patch_leave(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a call that ends a turn before its end."""

    def leave(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        known = _turns.get(self)
        if known is not None:
            call_safely(hook, known.leave, self)
        return result

    return leave


def _patch_run(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run(self: Any, buffer: Any) -> Any:
        known = _engines.get(self) if hook.alive else None
        if known is None or not known.turns:
            return original(self, buffer)
        call_safely(hook, known.begin_step)
        try:
            found = original(self, buffer)
        except BaseException as exc:
            call_safely(hook, known.fail, exc)
            raise
        call_safely(hook, known.end_step, found)
        return found

    return run


for _path, _make, _part in (
    ("Model.__init__", _names.wrap_loading, ""), ("Generator.__init__", _names.wrap_owner, ""), ("Generator.append_tokens", _patch_append, ""),
    ("Generator.generate_next_token", _patch_next, ""), ("Generator.is_done", _patch_done, ""),
    ("Tokenizer.encode", wrap_tokenizer, ""), ("Engine.__init__", _names.wrap_owner, "engine"),
    ("Engine.create_request", _patch_create, "engine"), ("Engine.run", _patch_run, "engine"),
    ("Request.begin_turn", _patch_turn, "engine"), ("Request.cancel_turn", _patch_leave, "engine"),
    ("Request.close", _patch_leave, "engine"),
):  # fmt: skip
    instrumentor.patch_hot_path(f"{_MODULE}:{_path}", part=_part)(_make)
