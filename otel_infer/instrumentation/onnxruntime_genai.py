"""Records onnxruntime-genai: a `Generator` whose caller asks for each token, and an `Engine` that computes several requests.

    Model(path) ─▶ phase `weights`      Generator ─ append_tokens ─ generate_next_token ─▶ a step ─ … ─ is_done, or dropped ─▶ end
    Engine.create_request ─ Request.begin_turn ─▶ submitted       Engine.run ─▶ a step of all turns; its events tell who got a token

The prompt is computed by `append_tokens`, so the first step begins there. Read and run: 0.18.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.generation_calls import Generation, SharedGenerations, begin_generation
from otel_infer.instrumentation.hooks.guarded_calls import call_or_fail, call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import LoadedNames
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_tokens, wrap_tokenizer
from otel_infer.ringbuffer import events
from otel_infer.tracing import start

PROVIDER = events.ONNXRUNTIME_GENAI
_MODULE = "onnxruntime_genai.onnxruntime_genai"

instrumentor = Instrumentor("onnxruntime_genai", "onnxruntime-genai", ("onnxruntime_genai",), is_engine=True)

_names = LoadedNames(PROVIDER)
LIBRARY = ModelLibrary(PROVIDER, _names.read_name, events.OPERATION_TEXT_COMPLETION)


# ── a generator ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Conversation:
    """A generator, which computes one generation after another. `max_length`: of prompt and answer; `rows`: that it computes."""

    generation: Generation | None = None

    def __init__(self, options: dict[str, float]) -> None:
        self.max_length = int(options.get("max_length", 0))
        self.rows = int(options.get("batch_size", 1) * options.get("num_return_sequences", 1))

    def begin_prompt(self, generator: Any, tokens: Any, hook: Hook) -> Generation | None:
        """Returns the generation that computes a prompt: a new one, or the present one of the same request."""
        count, generation = count_tokens(tokens), self.generation
        if generation is not None and self._is_over(generation):
            generation.finish()
        if generation is None or generation.is_ended:
            generation = self.begin(generator, hook, count)
        else:
            generation.note_prompt(count)
        if generation is not None:
            generation.begin_step(count)
        return generation

    def begin(self, generator: Any, hook: Hook, prompt_tokens: int = 0) -> Generation | None:
        """Begins a generation, and returns it; None if it is not recorded."""
        generation = self.generation = begin_generation(LIBRARY, generator, hook, is_prepared=False)
        if generation is not None:
            generation.submit(prompt_tokens, sequences=self.rows)
        return generation

    def begin_token(self, generator: Any, hook: Hook) -> Generation | None:
        """Returns the generation that computes the next token: a new one after `rewind_to`."""
        generation = self.generation
        if generation is None or generation.is_ended:
            generation = self.begin(generator, hook)
        if generation is not None and not generation.step:
            generation.begin_step(self.rows)
        return generation

    @staticmethod
    def _is_over(generation: Generation) -> bool:
        """Returns whether a further prompt belongs to another request, or is the next turn without a server."""
        if generation.owns_request:
            return generation.tokens > 0 or start.current_request() is not None
        return generation.request.ended or start.current_request() not in (None, generation.request)

    def end(self, reason: str = "") -> None:
        """Ends the present generation."""
        if self.generation is not None:
            self.generation.finish(reason)


_conversations: weakref.WeakKeyDictionary[Any, Conversation] = weakref.WeakKeyDictionary()


def _note_generator(generator: Any, options: dict[str, float], hook: Hook) -> None:
    conversation = _conversations[generator] = Conversation(options)
    weakref.finalize(generator, call_safely, hook, conversation.end)


def _patch_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    init_named = _names.wrap_owner(original, hook)

    def init(*args: Any, **kwargs: Any) -> None:
        init_named(*args, **kwargs)
        if hook.alive and len(args) > 2:
            call_safely(hook, lambda: _note_generator(args[0], args[2].get_search_options(), hook))

    return init


def _patch_append(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def append_tokens(*args: Any, **kwargs: Any) -> Any:
        known = _conversations.get(args[0]) if hook.alive and len(args) == 2 else None
        generation = None if known is None else call_safely(hook, known.begin_prompt, *args, hook)
        if generation is None:
            return original(*args, **kwargs)
        return call_or_fail(hook, generation, original, args, kwargs)

    return append_tokens


def _patch_next(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate_next_token(*args: Any, **kwargs: Any) -> Any:
        known = _conversations.get(args[0]) if hook.alive and args else None
        generation = None if known is None else call_safely(hook, known.begin_token, args[0], hook)
        if known is None or generation is None:
            return original(*args, **kwargs)
        result = call_or_fail(hook, generation, original, args, kwargs)
        call_safely(hook, generation.end_step, known.rows)
        return result

    return generate_next_token


def _patch_done(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def is_done(self: Any) -> Any:
        done = original(self)
        known = _conversations.get(self) if done and hook.alive else None
        if known is not None:
            call_safely(
                hook, lambda: known.end("length" if self.token_count() >= known.max_length else "stop")
            )
        return done

    return is_done


# ── an engine ────────────────────────────────────────────────────────────────────────────────────────────────────────


_engines: weakref.WeakKeyDictionary[Any, SharedGenerations] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Any, SharedGenerations] = weakref.WeakKeyDictionary()
"""The turns of an engine, by the engine and by each of its requests."""


def _note_request(engine: Any, request: Any, hook: Hook) -> None:
    known = _engines.get(engine)
    if known is None:
        known = _engines[engine] = SharedGenerations(LIBRARY, hook)
    _turns[request] = known
    _names.copy_name(request, engine)


def _patch_create(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _note_request, self, request, hook)
        return request

    return create_request


def _begin_turn(known: SharedGenerations, request: Any, tokens: Any, hook: Hook) -> None:
    count = count_tokens(tokens)
    turn = begin_generation(LIBRARY, request, hook, count, has_own_steps=False)
    if turn is not None:
        known.add(request, turn, count)


def _record_refused(request: Any, exc: BaseException, hook: Hook) -> None:
    turn = begin_generation(LIBRARY, request, hook, is_prepared=False, has_own_steps=False)
    if turn is not None:
        turn.fail(exc)


def _patch_turn(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def begin_turn(*args: Any, **kwargs: Any) -> Any:
        known = _turns.get(args[0]) if hook.alive and args else None
        try:
            result = original(*args, **kwargs)
        except BaseException as exc:
            if known is not None:
                call_safely(hook, _record_refused, args[0], exc, hook)
            raise
        if known is not None:
            tokens = args[1] if len(args) > 1 else kwargs.get("tokens", ())
            call_safely(hook, _begin_turn, known, args[0], tokens, hook)
        return result

    return begin_turn


def _patch_leave(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a call that ends a turn before its end."""

    def leave(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        known = _turns.get(self)
        if known is not None:
            call_safely(hook, known.leave, id(self))
        return result

    return leave


def _patch_run(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        known = _engines.get(args[0]) if hook.alive and args else None
        if not known:
            return original(*args, **kwargs)
        call_safely(hook, known.begin_step)
        found = call_or_fail(hook, known, original, args, kwargs)
        call_safely(hook, _end_run, known, found)
        return found

    return run


def _end_run(known: SharedGenerations, found: Any) -> None:
    """Records a run by the engine's events, some of which end their turn."""
    known.end_step(Counter(id(event.request) for event in found))
    for event in found:
        turn = known.take(event.request) if event.finish_reason.name != "NONE" else None
        if turn is None:
            continue
        if cached := int(event.usage.cached_prompt_tokens):
            read = events.PrefixRead(_clock.now(), int(event.usage.prompt_tokens), cached)
            turn.request.record_event(read)
        turn.tokens = int(event.usage.generated_tokens)
        turn.finish("length" if event.finish_reason.name.startswith("MAX") else "stop")


for _path, _make, _part in (
    ("Config.__init__", _names.wrap_owner, ""), ("Model.__init__", _names.wrap_loading, ""), ("Generator.__init__", _patch_init, ""),
    ("Generator.append_tokens", _patch_append, ""), ("Generator.generate_next_token", _patch_next, ""),
    ("Generator.is_done", _patch_done, ""), ("Tokenizer.encode", wrap_tokenizer, ""), ("Tokenizer.encode_batch", wrap_tokenizer, ""),
    ("Engine.__init__", _names.wrap_owner, "engine"),
    ("Engine.create_request", _patch_create, "engine"), ("Engine.run", _patch_run, "engine"),
    ("Request.begin_turn", _patch_turn, "engine"), ("Request.cancel_turn", _patch_leave, "engine"),
    ("Request.close", _patch_leave, "engine"),
):  # fmt: skip
    instrumentor.patch_hot_path(f"{_MODULE}:{_path}", part=_part)(_make)
