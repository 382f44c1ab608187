"""Records OpenVINO GenAI: text pipelines with the library's own instants of each token, continuous batching, other pipelines.

    LLMPipeline.generate ─▶ its metrics ─▶ tokenize, queue, prefill, decode steps, after the fact
    ContinuousBatchingPipeline.add_request ─▶ submitted       step ─▶ a step of all requests that are not finished

A prompt that is a `str` is answered by a `str`, without metrics: such a call is one `decode`, or has the calls of its streamer as
steps. Read and run: 2026.4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.generation_calls import Generation, SharedSteps, begin_generation
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import LoadedNames
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, count_inputs, wrap_call
from otel_infer.ringbuffer import events

PROVIDER = events.OPENVINO_GENAI
_MODULE = "openvino_genai.py_openvino_genai"
_FINISHED = "FINISHED"

instrumentor = Instrumentor("openvino_genai", "openvino-genai", ("openvino_genai",), is_engine=True)

_names = LoadedNames(PROVIDER)
TEXT = ModelLibrary(PROVIDER, _names.read_name, events.OPERATION_TEXT_COMPLETION)


# ── text pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────


def _wrap_generate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = begin_generation(TEXT, self, hook, is_prepared=False) if hook.alive else None
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
        try:
            result = original(self, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, generation.fail, exc)
            raise
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
    elif metrics is not None:
        _record_past(generation, metrics)
    generation.submit()
    generation.finish()


def _record_past(generation: Generation, metrics: Any) -> None:
    """Records tokenizer and steps by the instants of the library, in ms of the monotonic clock."""
    raw = metrics.raw_metrics
    ends = [round(at * 1e6) for at in raw.m_new_token_times]
    if not ends:
        return
    tokenized_at = generation.began_at + round(sum(raw.tokenization_durations) * 1e3)
    if tokenized_at > generation.began_at:
        generation.request.record_stage_at(tokenized_at, events.TOKENIZE, generation.began_at, 0)
    prompt, tokens = int(metrics.get_num_input_tokens()), int(metrics.get_num_generated_tokens())
    generation.submit(prompt, tokenized_at)
    first = ends[0] - round(next(iter(raw.token_infer_durations), 0) * 1e3)
    begins = [min(max(first, tokenized_at), ends[0]), *ends[:-1]]
    rows = max(tokens // len(ends), 1)
    for number, (began_at, ended_at) in enumerate(zip(begins, ends)):
        generation.begin_step(rows if number else max(prompt, 1), at=began_at)
        generation.end_step(rows, ended_at)
    generation.tokens = tokens


# ── continuous batching ──────────────────────────────────────────────────────────────────────────────────────────────


class Batching:
    """The requests of a pipeline that are not finished: each handle with its generation. Any thread may add one.

    `in_step`: those of the step that runs. `started`: those that have a token.
    """

    def __init__(self) -> None:
        self.running: list[tuple[Any, Generation]] = []
        self.in_step: list[tuple[Any, Generation]] = []
        self.started: set[Any] = set()
        self.steps = SharedSteps(TEXT)

    def begin_step(self) -> None:
        self.in_step = list(self.running)
        self.steps.begin_step([generation for _, generation in self.in_step], [1] * len(self.in_step))

    def end_step(self) -> None:
        """Ends a step. The library does not tell who got a token: all that have one before, or can read their first."""
        self.started |= {handle for handle, _ in self.in_step if handle.can_read()}
        self.steps.end_step([int(handle in self.started) for handle, _ in self.in_step])
        for handle, generation in self.in_step:
            if handle.get_status().name == _FINISHED:
                metrics = handle.get_perf_metrics()
                generation.tokens = len(metrics.raw_metrics.m_new_token_times) or generation.tokens
                generation.note_prompt(int(metrics.get_num_input_tokens()))
                generation.finish()
            elif handle.get_status().name != "RUNNING":
                generation.fail(GeneratorExit())
        self._keep_running()

    def fail(self, exc: BaseException) -> None:
        """Ends all requests, because a step failed."""
        for _, generation in self.in_step:
            generation.fail(exc)
        self._keep_running()

    def _keep_running(self) -> None:
        self.running = [pair for pair in self.running if not pair[1].is_ended]
        self.started &= {handle for handle, _ in self.running}
        if not self.running:
            self.steps.release()


def _find_batching(pipeline: Any) -> Batching:
    known: Batching | None = _batchings.get(pipeline)
    if known is None:
        known = _batchings[pipeline] = Batching()
    return known


_batchings: weakref.WeakKeyDictionary[Any, Batching] = weakref.WeakKeyDictionary()


def _wrap_add(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = begin_generation(TEXT, self, hook, has_own_steps=False) if hook.alive else None
        try:
            handle = original(self, *args, **kwargs)
        except BaseException as exc:
            if generation is not None:
                call_safely(hook, generation.fail, exc)
            raise
        if generation is not None:
            call_safely(hook, lambda: _find_batching(self).running.append((handle, generation)))
        return handle

    return add_request


def _wrap_step(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def step(self: Any) -> Any:
        known = _batchings.get(self) if hook.alive else None
        if known is None or not known.running:
            return original(self)
        call_safely(hook, known.begin_step)
        try:
            result = original(self)
        except BaseException as exc:
            call_safely(hook, known.fail, exc)
            raise
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
for _pipeline, _name, _operation in (
    ("TextEmbeddingPipeline", "embed_documents", events.OPERATION_EMBEDDINGS),
    ("TextEmbeddingPipeline", "embed_query", events.OPERATION_EMBEDDINGS),
    ("TextRerankPipeline", "rerank", events.OPERATION_RERANK),
    ("WhisperPipeline", "generate", events.OPERATION_TRANSCRIPTION),
    ("Text2ImagePipeline", "generate", events.OPERATION_GENERATE_CONTENT),
    ("Image2ImagePipeline", "generate", events.OPERATION_GENERATE_CONTENT),
):
    _patch(
        f"{_pipeline}.{_name}", wrap_call(ModelLibrary(PROVIDER, _names.read_name, _operation), count_inputs)
    )
for _pipeline in ("TextEmbeddingPipeline", "TextRerankPipeline", "WhisperPipeline", "Text2ImagePipeline"):
    _patch(f"{_pipeline}.__init__", _names.wrap_loading)
