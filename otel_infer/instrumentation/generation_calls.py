"""Records generations by libraries that decode in the thread of their caller: each pass over the model is a step.

    begin_generation ─▶ (begin_step ─ the model computes ─ end_step)* ─▶ finish or fail

A generation belongs to the current request; without one it is a request of its own. Its steps go to a ring of the library,
which one generation has at a time.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.thread_counters import begin_thread_run, record_thread_run
from otel_infer.instrumentation.model_calls import ModelLibrary, describe_model, guard_rows, open_request
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start
from otel_infer.tracing.outcome import classify_exception

_get_packed = attrgetter("packed")


class Generation:
    """One generation while it runs, for one request.

    `owns_request`: the request was opened for it. `tokens`: delivered so far. `step`: the number of the step that runs.
    `writer`: None while steps are not recorded. `began_at`: monotonic ns.
    """

    __slots__ = (
        "_members", "began_at", "is_ended", "is_submitted", "library", "max_tokens", "owns_request", "packed", "request", "step", "steps", "tokens",
        "writer",
    )  # fmt: skip

    def __init__(
        self,
        library: ModelLibrary,
        request: request_span.RequestSpan,
        owns_request: bool,
        max_tokens: int,
        has_own_steps: bool = True,
    ) -> None:
        self.library, self.request, self.owns_request = library, request, owns_request
        self.packed, self.max_tokens, self.began_at = request.packed, max_tokens, _clock.now()
        self.tokens = self.step = self.steps = 0
        self.is_ended = self.is_submitted = False
        self._members = [self]
        self.writer = _acquire_writer(library) if has_own_steps else None
        if self.writer is not None:
            begin_thread_run()
        elif has_own_steps:
            recorder.record_missing_steps(request.handle)

    def submit(self, prompt_tokens: int = 0, at: int = 0, sequences: int = 1) -> None:
        """Records that the input is handed over to the model, once. `prompt_tokens`: 0 = unknown. `at`: monotonic ns; 0 = now."""
        if self.is_submitted:
            return
        self.is_submitted, self.request.engine = True, self.library.provider
        counts = events.clamp_count(prompt_tokens), self.max_tokens, self.library.provider
        self.request.record_event(events.RequestSubmitted(at or _clock.now(), sequences, *counts))

    def note_prompt(self, tokens: int) -> None:
        """Records further tokens of the prompt, or those of one that was submitted as a text."""
        prompt = events.RequestSubmitted(_clock.now(), 0, tokens, 0, self.library.provider)
        self.request.record_event(prompt)

    def begin_step(self, tokens: int = 1, kv_used: int = 0, kv_total: int = 0, at: int = 0) -> None:
        """Records that a pass over the model begins, `at` (monotonic ns; 0 = now).

        `tokens`: that it computes. `kv_*`: KV blocks, 0 of 0 = unknown.
        """
        self.steps += 1
        if self.writer is not None:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.step = self.writer.write_scheduled(self._members, (), column, kv_used, kv_total, 1, 0, at=at)

    def end_step(self, tokens: int = 1, at: int = 0) -> None:
        """Records that the results of the step are known, `at` (monotonic ns; 0 = now). `tokens`: that it delivered."""
        self.tokens += tokens
        if self.writer is not None and self.step:
            column = b"" if tokens == 1 else array("I", (tokens,)).tobytes()
            self.writer.write_done(self.step, column, 1, at=at)
            self.step = 0

    def drop_step(self) -> None:
        """Ends a step that delivered nothing, because the generation was over before it."""
        if self.step:
            self.end_step(0)
            self.steps -= 1

    def finish(self, reason: str = "", has_decoded: bool = True) -> None:
        """Records the normal end. `reason`: of the library; "" = `length` at the most tokens, else `stop`.

        `has_decoded`: False = there was nothing to generate; else a generation without steps is one `decode`.
        """
        if self.is_ended:
            return
        if not self.steps and has_decoded:
            self.request.record_event(events.RequestScheduled(self.began_at))
            self.request.record_stage(events.DECODE, self.began_at, self.tokens)
        reason = reason or ("length" if 0 < self.max_tokens <= self.tokens else "stop")
        self.request.record_event(events.EngineFinished(_clock.now(), reason, self.tokens))
        self.request.set_engine_error("")
        self._end(events.OK, "")

    def fail(self, exc: BaseException) -> None:
        """Records that the generation failed, or was left before its end."""
        if self.is_ended:
            return
        outcome, error_type = classify_exception(exc)
        reason = "error" if outcome == events.ERROR else "abort"
        self.request.record_event(events.EngineFinished(_clock.now(), reason, self.tokens))
        if outcome == events.ERROR and not self.owns_request:
            self.request.set_engine_error(error_type)
        self._end(outcome, error_type)

    def _end(self, outcome: int, error_type: str) -> None:
        self.is_ended = True
        writer, self.writer = self.writer, None
        if writer is not None:
            record_thread_run(writer, self.library.provider)
            recorder.release_batch_writer(self.library.provider, writer)
        self._members.clear()
        if self.owns_request:
            self.request.close(outcome, error_type)


class SharedSteps:
    """The steps of a library that computes several generations in one pass, in one thread. A next one may begin before its end."""

    __slots__ = ("_launched", "_library", "_writer")

    def __init__(self, library: ModelLibrary) -> None:
        self._library = library
        self._writer: BatchWriter | None = None
        self._launched: deque[tuple[int, list[Any]]] = deque()

    def begin_step(self, members: list[Any], tokens: list[int], at: int = 0) -> None:
        """Records that a pass begins. `members` have `packed`, `steps` and `tokens`, as a `Generation` has.

        `tokens`: that it computes, of each member. `at`: monotonic ns; 0 = now.
        """
        if self._writer is None or not self._writer.alive:
            self._writer = _acquire_writer(self._library)
        for member in members:
            member.steps += 1
        step = 0
        if self._writer is not None:
            column = array("I", tokens).tobytes() if set(tokens) != {1} else b""
            step = self._writer.write_scheduled(members, (), column, 0, 0, len(members), 0, at=at)
        self._launched.append((step, members))

    def end_step(self, tokens: list[int]) -> None:
        """Records that the results of the first step without are known. `tokens`: that it delivered, of each member."""
        step, members = self._launched.popleft() if self._launched else (0, [])
        for member, count in zip(members, tokens):
            member.tokens += count
        if self._writer is not None and step and len(tokens) == len(members):
            column = array("I", tokens).tobytes() if set(tokens) != {1} else b""
            self._writer.write_done(step, column, len(tokens))

    def get_members(self) -> list[Any]:
        """Returns the members of the first step without results."""
        return self._launched[0][1] if self._launched else []

    def cancel_step(self) -> None:
        """Records that the pass which began last has failed, and delivers nothing."""
        if self._launched:
            self._launched.rotate(1)
            self.end_step([0] * len(self.get_members()))

    def release(self) -> None:
        """Gives up the ring: no generation is left."""
        writer, self._writer = self._writer, None
        self._launched.clear()
        if writer is not None:
            recorder.release_batch_writer(self._library.provider, writer)


class SharedGenerations:
    """Generations that a library computes together, by the ids of the objects that stand for them: requests, handles.

    The library tells only after a pass who got a token, so it is recorded then. If nobody got one, a part of the oldest prompt was
    computed. An object that is dropped ends its generation, so there is no reference to it here.
    """

    def __init__(self, library: ModelLibrary, hook: Hook) -> None:
        self._steps, self._hook = SharedSteps(library), hook
        self._generations: dict[int, Generation] = {}
        self._left: dict[int, int] = {}
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._held: list[Any] = []
        self._began_at = 0

    def __bool__(self) -> bool:
        return bool(self._generations)

    def add(self, owner: Any, generation: Generation, prompt_tokens: int = 1) -> None:
        """Adds a generation, which waits from now on."""
        key = id(owner)
        self._generations[key], self._left[key] = generation, prompt_tokens
        self._owners[key] = weakref.ref(owner, lambda _: call_safely(self._hook, self.leave, key))

    def list_owners(self) -> list[Any]:
        """Returns the objects that stand for the generations."""
        return [owner for reference in list(self._owners.values()) if (owner := reference()) is not None]

    def begin_step(self) -> list[Any]:
        """Notes that a pass begins. Returns the objects, which are kept until its end: a reader may see the end of one, and drop it."""
        self._began_at, self._held = _clock.now(), self.list_owners()
        return self._held

    def end_step(self, delivered: Mapping[int, int]) -> None:
        """Records a pass. `delivered`: the tokens of each object that got some, by its id."""
        delivered = {key: count for key, count in delivered.items() if key in self._generations}
        waiting = [key for key in self._generations if self._left[key]]
        keys = list(delivered) or waiting[:1] or list(self._generations)
        computed = [self._left[key] or 1 if key in delivered else 1 for key in keys]
        self._steps.begin_step([self._generations[key] for key in keys], computed, self._began_at)
        self._steps.end_step([delivered.get(key, 0) for key in keys])
        self._left.update(dict.fromkeys(delivered, 0))
        self._held = []

    def take(self, owner: Any) -> Generation | None:
        """Returns a generation, which is about to end, and forgets it; None if it has ended."""
        return self._take(id(owner))

    def _take(self, key: int) -> Generation | None:
        generation = self._generations.pop(key, None)
        self._left.pop(key, None)
        self._owners.pop(key, None)
        if not self._generations:
            self._steps.release()
        return generation

    def leave(self, key: int) -> None:
        """Ends a generation whose object, of this id, is dropped, or that is cancelled."""
        generation = self._take(key)
        if generation is not None:
            generation.fail(GeneratorExit())

    def fail(self, exc: BaseException) -> None:
        """Ends all generations, because the library failed."""
        self._held = []
        for key in list(self._generations):
            generation = self._take(key)
            if generation is not None:
                generation.fail(exc)


def _acquire_writer(library: ModelLibrary) -> BatchWriter | None:
    writer = recorder.acquire_batch_writer(library.provider)
    if writer is not None:
        writer.pack_handles = _pack_handles
    return writer


def _pack_handles(members: Any) -> bytes:
    return b"".join(map(_get_packed, members))


@guard_rows
def read_limit(configs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the most tokens of an answer by `max_new_tokens`, of a call's settings or by its name; 0 = unlimited, or not known."""
    config: Any = next(iter(configs), kwargs.get("generation_config"))
    most = int(kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", 0) or 0)
    return most if most <= events.MAX_COUNT else 0


def begin_generation(
    library: ModelLibrary,
    model: Any,
    hook: Hook,
    prompt_tokens: int = 0,
    max_tokens: int = 0,
    is_prepared: bool = True,
    has_own_steps: bool = True,
) -> Generation | None:
    """Returns the generation that begins now; None if it is not recorded. Counts: 0 = unknown.

    `is_prepared`: False = the library prepares its input first, and calls `Generation.submit` then. `has_own_steps`: False = its
    steps are those of a `SharedSteps`.
    """
    try:
        request = start.begin_model_call()
        owns_request = request is None
        request = request or open_request(library, model, generative=True)
        if request is None:
            return None
        if not owns_request:
            name_request(request, library, model)
        generation = Generation(library, request, owns_request, max_tokens, has_own_steps)
        if is_prepared:
            generation.submit(prompt_tokens)
        return generation
    except Exception as exc:
        hook.mark_failed(exc)
        return None


def name_request(request: request_span.RequestSpan, library: ModelLibrary, model: Any) -> None:
    """Sets operation, provider and model of a server's request, if no generation has done it."""
    if not request.is_named:
        request.is_named = True
        known = describe_model(library, model)
        operation, provider, name = known.operation
        request.set_operation(request.operation or operation, provider, name)
        request.set_execution_provider(known.place)


def record_refusal(
    request: request_span.RequestSpan, library: ModelLibrary, model: Any, exc: BaseException
) -> None:
    """Records in a server's request that the library refused a prompt, before a generation began."""
    outcome, error_type = classify_exception(exc)
    if outcome == events.ERROR:
        name_request(request, library, model)
        request.set_engine_error(error_type)
