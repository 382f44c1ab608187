"""Records OpenVINO GenAI: text pipelines with the library's own instants of each token, continuous batching, other pipelines.

    LLMPipeline.generate ─▶ its metrics ─▶ tokenize, queue, prefill, decode steps, after the fact
    ContinuousBatchingPipeline.add_request ─▶ submitted       step ─▶ a step of all requests that are not finished

A prompt that is a `str` is answered by a `str`, without metrics: such a call is one `decode`, or has the calls of its streamer as
steps. Read and run: 2026.4.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.generation_calls import (
    Generation,
    SharedGenerations,
    begin_generation,
    read_limit,
)
from otel_infer.instrumentation.hooks.guarded_calls import call_or_fail, call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import LoadedNames
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_inputs, wrap_call
from otel_infer.ringbuffer import events

PROVIDER = events.OPENVINO_GENAI
_MODULE = "openvino_genai.py_openvino_genai"
_ENDED = ("FINISHED", "STOP")
_COMPUTED = ("RUNNING", "FINISHED")
"""States of a request that has ended normally, and of one that the last step computed."""

instrumentor = Instrumentor("openvino_genai", "openvino-genai", ("openvino_genai",), is_engine=True)

_names = LoadedNames(PROVIDER)
TEXT = ModelLibrary(PROVIDER, _names.read_name, events.OPERATION_TEXT_COMPLETION)


# ── text pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────


def _wrap_generate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = None
        if hook.alive:
            most = read_limit(args[1:2], kwargs)
            generation = begin_generation(TEXT, self, hook, max_tokens=most, is_prepared=False)
        if generation is None:
            return original(self, *args, **kwargs)
        streamer = args[2] if len(args) > 2 else kwargs.get("streamer")
        if callable(streamer):
            followed = _follow_streamer(generation, streamer, hook)
            args, kwargs = (
                ((*args[:2], followed, *args[3:]), kwargs)
                if len(args) > 2
                else (args, {**kwargs, "streamer": followed})
            )
        result = call_or_fail(hook, generation, original, (self, *args), kwargs)
        call_safely(hook, _end_generation, generation, result)
        return result

    return generate


def _follow_streamer(generation: Generation, streamer: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns the streamer, each call of which ends a step."""
    call_safely(hook, generation.submit)
    call_safely(hook, generation.begin_step)

    def stream(*args: Any) -> Any:
        call_safely(hook, generation.end_step)
        result = streamer(*args)
        call_safely(hook, generation.begin_step)
        return result

    return stream


def _end_generation(generation: Generation, result: Any) -> None:
    results = result if isinstance(result, list) else [result]
    metrics = getattr(results[0] if results else None, "perf_metrics", None)
    if generation.step:
        generation.drop_step()
        if metrics is not None:
            generation.tokens = int(metrics.get_num_generated_tokens()) or generation.tokens
            generation.note_prompt(int(metrics.get_num_input_tokens()))
    elif metrics is not None:
        prompt = sum(int(each.perf_metrics.get_num_input_tokens()) for each in results)
        _record_past(generation, metrics, prompt)
    generation.submit()
    reasons = [each.name for result in results for each in getattr(result, "finish_reasons", ())]
    generation.finish(reasons[0].lower() if reasons and reasons[0] in ("STOP", "LENGTH") else "")


def _record_past(generation: Generation, metrics: Any, prompt: int) -> None:
    """Records tokenizer and steps by the instants of the library, in ms of the monotonic clock. `prompt`: its tokens."""
    raw = metrics.raw_metrics
    ends = [round(at * 1e6) for at in raw.m_new_token_times]
    if not ends:
        return
    tokenized_at = generation.began_at + round(sum(raw.tokenization_durations) * 1e3)
    if tokenized_at > generation.began_at:
        generation.request.record_stage_at(tokenized_at, events.TOKENIZE, generation.began_at, 0)
    tokens = int(metrics.get_num_generated_tokens())
    generation.submit(prompt, tokenized_at)
    first = ends[0] - round(next(iter(raw.token_infer_durations), 0) * 1e3)
    begins = [min(max(first, tokenized_at), ends[0]), *ends[:-1]]
    sizes = list(raw.m_batch_sizes)
    rows = sizes if len(sizes) == len(ends) else [max(tokens // len(ends), 1)] * len(ends)
    for number, (began_at, ended_at) in enumerate(zip(begins, ends)):
        generation.begin_step(rows[number] if number else max(prompt, 1), at=began_at)
        generation.end_step(rows[number], ended_at)
    generation.tokens = tokens


# ── continuous batching ──────────────────────────────────────────────────────────────────────────────────────────────


class Batching:
    """The requests of a pipeline that are not finished. Any thread may add one, or read its tokens."""

    def __init__(self, hook: Hook) -> None:
        self.requests = SharedGenerations(TEXT, hook)
        self.fail = self.requests.fail

    def add(self, handle: Any, generation: Generation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a request, by the arguments of `add_request`. Some answers can be read later than they are computed."""
        config: Any = args[2] if len(args) > 2 else kwargs.get("generation_config")
        several = getattr(config, "num_beams", 1) > 1 or getattr(config, "num_return_sequences", 1) > 1
        if not (several or getattr(config, "stop_strings", None)):
            _waiting.add(id(handle))
        self.requests.add(handle, generation)

    def begin_step(self) -> None:
        """Begins a step, which forgets the state of requests that were stopped before it."""
        for handle in self.requests.begin_step():
            if handle.get_status().name == "STOP":
                self._end(handle, "STOP")

    def end_step(self) -> None:
        """Ends a step. The library does not tell who got a token: all that have one before, or can read their first."""
        handles = self.requests.list_owners()
        states = {id(handle): handle.get_status().name for handle in handles}
        _waiting.difference_update(
            key for key, handle in zip(states, handles) if key in _waiting and handle.can_read()
        )
        computed = [key for key, state in states.items() if key not in _waiting and state in _COMPUTED]
        self.requests.end_step(dict.fromkeys(computed, 1))
        for handle in handles:
            if states[id(handle)] != "RUNNING":
                self._end(handle, states[id(handle)])

    def _end(self, handle: Any, state: str) -> None:
        generation = self.requests.take(handle)
        _waiting.discard(id(handle))
        if generation is None:
            return
        with contextlib.suppress(RuntimeError):  # it has none before its end
            metrics = handle.get_perf_metrics()
            generation.tokens = int(metrics.get_num_generated_tokens()) or generation.tokens
            generation.note_prompt(int(metrics.get_num_input_tokens()))
        if state in _ENDED:
            generation.finish("stop" if state == "STOP" else "")
        else:
            generation.fail(GeneratorExit())


def _find_batching(pipeline: Any, hook: Hook) -> Batching:
    known: Batching | None = _batchings.get(pipeline)
    if known is None:
        known = _batchings[pipeline] = Batching(hook)
    return known


_waiting: set[int] = set()
"""The ids of handles, of any pipeline, without a token."""
_batchings: weakref.WeakKeyDictionary[Any, Batching] = weakref.WeakKeyDictionary()


def _wrap_add(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = None
        if hook.alive:
            most = read_limit(args[2:3], kwargs)
            generation = begin_generation(TEXT, self, hook, max_tokens=most, has_own_steps=False)
        if generation is None:
            return original(self, *args, **kwargs)
        handle = call_or_fail(hook, generation, original, (self, *args), kwargs)
        call_safely(hook, lambda: _find_batching(self, hook).add(handle, generation, args, kwargs))
        return handle

    return add_request


def _wrap_read(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A reader in another thread may have what a step computed before the step returns."""

    def read(self: Any) -> Any:
        result = original(self)
        if result:
            _waiting.discard(id(self))
        return result

    return read


def _wrap_step(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def step(self: Any) -> Any:
        known = _batchings.get(self) if hook.alive else None
        if known is None or not known.requests:
            return original(self)
        call_safely(hook, known.begin_step)
        result = call_or_fail(hook, known, original, (self,), {})
        call_safely(hook, known.end_step)
        return result

    return step


def _patch(path: str, make: Any) -> None:
    instrumentor.patch_hot_path(f"{_MODULE}:{path}", optional=True)(make)


for _pipeline in ("LLMPipeline", "VLMPipeline", "ContinuousBatchingPipeline"):
    _patch(f"{_pipeline}.__init__", _names.wrap_loading)
    for _name in ("generate", "__call__"):
        _patch(f"{_pipeline}.{_name}", _wrap_generate)
_patch("ContinuousBatchingPipeline.add_request", _wrap_add)
_patch("ContinuousBatchingPipeline.step", _wrap_step)
for _name in ("read", "read_all"):
    _patch(f"GenerationHandle.{_name}", _wrap_read)
_CALLS = (
    ("TextEmbeddingPipeline", "embed_documents", events.OPERATION_EMBEDDINGS),
    ("TextEmbeddingPipeline", "embed_query", events.OPERATION_EMBEDDINGS),
    ("TextRerankPipeline", "rerank", events.OPERATION_RERANK),
    ("WhisperPipeline", "generate", events.OPERATION_TRANSCRIPTION),
    ("Text2ImagePipeline", "generate", events.OPERATION_GENERATE_CONTENT),
    ("Image2ImagePipeline", "generate", events.OPERATION_GENERATE_CONTENT),
)
for _pipeline, _name, _operation in _CALLS:
    _library = ModelLibrary(PROVIDER, _names.read_name, _operation)
    _patch(f"{_pipeline}.{_name}", wrap_call(_library, count_inputs))
for _pipeline in dict.fromkeys(_call[0] for _call in _CALLS):
    _patch(f"{_pipeline}.__init__", _names.wrap_loading)
