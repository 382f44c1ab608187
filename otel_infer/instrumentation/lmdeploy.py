"""Records LMDeploy's PyTorch engine, whose loop runs in the process and on the event loop of its API server.

    AsyncEngine.generate ─ EngineInstance.async_stream_infer ─▶ submitted       Engine._add_message ─▶ received
    InputsMakerAsync.send_next_inputs, prefetch_next_inputs ─▶ scheduled        EngineLoop._finish_forward_output ─▶ done

The next batch is sent before the results of the one before have come. By source of 0.18.0, and on stubs with its signatures: it
was never run, because it needs a GPU. TurboMind, and an engine in another process, are not followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.generation_calls import Generation, SharedSteps, begin_generation
from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.guarded_calls import call_before, call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.model_calls import ModelLibrary
from otel_infer.ringbuffer import events

PROVIDER = events.LMDEPLOY
_ENGINE = "lmdeploy.pytorch.engine"
_REQUESTS, _STEPS = "requests", "steps"

instrumentor = Instrumentor("lmdeploy", "lmdeploy", ("lmdeploy",), is_engine=True)

_model_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Names of the models, by their engine."""


def read_model(instance: Any) -> str:
    """Returns the name of the model of an engine's instance: its hub id, or the last component of its folder."""
    return _model_names.get(instance.engine, "model")


LIBRARY = ModelLibrary(PROVIDER, read_model, events.OPERATION_TEXT_COMPLETION)

_sessions: dict[int, Generation] = {}
"""Generations in flight, by LMDeploy's id of their session."""
_steps = SharedSteps(LIBRARY)


@instrumentor.patch_hot_path(f"{_ENGINE}.engine:Engine.__init__", reads=("model_path",), part=_REQUESTS)
def _patch_engine(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, model_path: Any, *args: Any, **kwargs: Any) -> None:
        original(self, model_path, *args, **kwargs)
        if hook.alive:
            call_safely(hook, lambda: _model_names.__setitem__(self, strip_model_path(str(model_path))))

    return init


@instrumentor.patch_hot_path(
    f"{_ENGINE}.engine_instance:EngineInstance.async_stream_infer",
    reads=("session_id", "input_ids", "gen_config"),
    part=_REQUESTS,
)
def _patch_stream(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def async_stream_infer(
        self: Any, session_id: int, input_ids: Any, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        most = events.clamp_count(getattr(gen_config, "max_new_tokens", 0) or 0)
        begun = (
            begin_generation(LIBRARY, self, hook, len(input_ids), most, has_own_steps=False)
            if hook.alive
            else None
        )
        if begun is not None:
            _sessions[session_id] = begun
        try:
            async with aclosing(
                original(self, session_id, input_ids, gen_config, *args, **kwargs)
            ) as outputs:
                async for output in outputs:
                    if begun is not None:
                        call_safely(hook, _note_output, begun, output)
                    yield output
        except BaseException as exc:
            if begun is not None:
                call_safely(hook, begun.fail, exc)
            raise
        finally:
            if begun is not None:
                call_safely(hook, _end_session, session_id, begun)

    return async_stream_infer


def _end_session(session_id: int, generation: Generation) -> None:
    """Forgets a session. A generation that has not ended was left by its reader."""
    _sessions.pop(session_id, None)
    generation.fail(GeneratorExit())
    if not _sessions:
        _steps.release()


def _note_output(generation: Generation, output: Any) -> None:
    """Notes tokens that reach the server, and the end of a generation by the status of an output."""
    if len(output.token_ids):
        generation.request.record_token_reached()
    status = output.status.name
    if status == "FINISH":
        generation.finish()
    elif status == "CANCEL":
        generation.fail(GeneratorExit())
    elif status != "SUCCESS":
        generation.fail(RuntimeError())


def _record_received(engine: Any, reqs: Any) -> None:
    for req in reqs:
        generation = _sessions.get(req.data["session_id"])
        if generation is not None:
            generation.request.record_event(events.RequestReceived(_clock.now()))


instrumentor.patch_hot_path(f"{_ENGINE}.engine:Engine._add_message", reads=("reqs",), part=_REQUESTS)(
    call_before(_record_received)
)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_inputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a function that sends the inputs of the next batch, and returns them with its sequences."""
    check_is_coroutine(original)

    async def send_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, running = await original(self, *args, **kwargs)
        if running and hook.alive:
            call_safely(hook, _record_scheduled, inputs, running)
        return inputs, running

    return send_inputs


for _name in ("send_next_inputs", "prefetch_next_inputs"):
    instrumentor.patch_hot_path(f"{_ENGINE}.inputs_maker:InputsMakerAsync.{_name}", part=_STEPS)(
        _patch_inputs
    )


def _find_members(running: Any) -> tuple[list[Any], list[Generation]]:
    """Returns the sequences of a batch whose requests are recorded, and their generations."""
    found = [(sequence, _sessions.get(sequence.session_id)) for sequence in running]
    known = [(sequence, generation) for sequence, generation in found if generation is not None]
    return [sequence for sequence, _ in known], [generation for _, generation in known]


def _record_scheduled(inputs: Any, running: Any) -> None:
    sequences, members = _find_members(running)
    model_inputs = inputs["inputs"]
    is_prefill = model_inputs is not None and not model_inputs.is_decoding
    for sequence, member in zip(sequences, members):
        if is_prefill and not member.steps and sequence.cached_tokens:
            prompt = int(sequence.cached_tokens + sequence.num_token_ids)
            member.request.record_event(events.PrefixRead(_clock.now(), prompt, int(sequence.cached_tokens)))
    tokens = [int(sequence.num_token_ids) if is_prefill else 1 for sequence in sequences]
    _steps.begin_step(members, tokens)


@instrumentor.patch_hot_path(
    f"{_ENGINE}.engine_loop:EngineLoop._finish_forward_output", reads=("out", "running"), part=_STEPS
)
def _patch_outputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish_forward_output(self: Any, out: Any, running: Any, *args: Any, **kwargs: Any) -> Any:
        sequences = call_safely(hook, _find_members, running)[0] if running and hook.alive else None
        before = [len(sequence.generated_ids) for sequence in sequences] if sequences is not None else []
        result = original(self, out, running, *args, **kwargs)
        if sequences is not None:
            call_safely(hook, _record_done, sequences, before)
        return result

    return finish_forward_output


def _record_done(sequences: list[Any], before: list[int]) -> None:
    """Ends a step. A chunk of a prompt delivers nothing, and several tokens come where drafts were accepted."""
    _steps.end_step([max(len(one.generated_ids) - count, 0) for one, count in zip(sequences, before)])
