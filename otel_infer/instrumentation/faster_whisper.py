"""Records transcriptions of faster-whisper: each window of the audio that is decoded, or each batch of them, is a step.

    transcribe ─▶ `prepare media` (decode the audio, compute its features) ─▶ returns a generator of segments
    a segment is asked for ─▶ `encode` ─ generate_with_fallback ─▶ a step         the generator ends ─▶ the request's end

Read and run: 1.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.followed_streams import StreamWork, call_at_work, follow_stream
from otel_infer.instrumentation.generation_calls import Generation, begin_generation
from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.model_calls import ModelLibrary, count_rows, wrap_call
from otel_infer.ringbuffer import events
from otel_infer.tracing.context import detach

PROVIDER = events.FASTER_WHISPER
_MODULE = "faster_whisper.transcribe"
NAME = "otel_infer_name"
"""Attribute of a model: its size, or the folder it was loaded from."""

instrumentor = Instrumentor("faster_whisper", "faster-whisper", ("faster_whisper",), is_engine=True)


def read_model(model: Any) -> str:
    """Returns the name of the model: its size, or the folder it was loaded from. A pipeline is named by its model."""
    inner = model if hasattr(model, NAME) else getattr(model, "model", model)
    return str(getattr(inner, NAME, type(model).__name__))


LIBRARY = ModelLibrary(PROVIDER, read_model, events.OPERATION_TRANSCRIPTION)


class _ThreadState(threading.local):
    """The transcription that this thread computes."""

    transcription: Transcription | None = None


_thread = _ThreadState()


class Transcription(StreamWork):
    """A transcription, from the call of `transcribe` to the end of its segments."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def enter(self) -> Any:
        outer, _thread.transcription = _thread.transcription, self
        generation = self.generation
        token = generation.request.attach() if generation.owns_request else None
        return outer, token, torch_suppressed.set(True)

    def leave(self, entered: Any) -> None:
        _thread.transcription, token, flag = entered
        torch_suppressed.reset(flag)
        if token is not None:
            detach(token)

    def begin_model(self, at: int) -> None:
        """Records, once, that the audio is prepared and its encoder begins (monotonic ns), which is a part of prefill."""
        if not self.generation.is_submitted:
            request = self.generation.request
            request.record_stage_at(at, events.PREPARE_MEDIA, self.generation.began_at, 0)
            self.generation.submit()
            request.record_event(events.RequestScheduled(at))

    def note_duration(self, seconds: Any) -> None:
        self.generation.request.record_attribute(events.AUDIO_DURATION, float(seconds))

    def end(self, exc: BaseException | None) -> None:
        if exc is None:
            if not self.generation.is_submitted:  # audio without speech
                self.generation.request.record_stage(events.PREPARE_MEDIA, self.generation.began_at)
            self.generation.finish("stop", has_decoded=False)
        else:
            self.generation.fail(exc)


def _patch_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else kwargs.get("model_size_or_path", "")
        setattr(self, NAME, read_file_name(str(path)))
        return original(self, *args, **kwargs)

    init.__name__ = "__init__"
    return wrap_loading(PROVIDER, read_model)(init, hook)


def _patch_transcribe(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def transcribe(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_inner = not hook.alive or _thread.transcription is not None
        generation = None if is_inner else begin_generation(LIBRARY, self, hook, is_prepared=False)
        if generation is None:
            return original(self, *args, **kwargs)
        work = Transcription(generation)
        segments, info = call_at_work(work, hook, original, (self, *args), kwargs)
        call_safely(hook, work.note_duration, info.duration)
        return follow_stream(segments, work, hook), info

    return transcribe


def _patch_encode(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        work, started_at = _thread.transcription if hook.alive else None, _clock.now()
        if work is not None:
            call_safely(hook, work.begin_model, started_at)
        try:
            return original(self, *args, **kwargs)
        finally:
            if work is not None:
                call_safely(hook, work.generation.request.record_stage, events.ENCODE, started_at)

    return encode


def _patch_decode(
    count_tokens: Callable[[Any], int],
) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    """Returns a factory for a function that decodes a window, or a batch. `count_tokens`: of what it returns."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = _thread.transcription if hook.alive else None
            if work is None:
                return original(self, *args, **kwargs)
            call_safely(hook, work.generation.begin_step)
            result = original(self, *args, **kwargs)
            call_safely(hook, lambda: work.generation.end_step(count_tokens(result)))
            return result

        return decode

    return make_wrapper


def _count_window(result: Any) -> int:
    return len(result[0].sequences_ids[0])


def _count_batch(result: Any) -> int:
    return sum(len(row["tokens"]) for row in result[1])


_BATCHED = "BatchedInferencePipeline"
for _path, _make in (
    ("WhisperModel.detect_language", wrap_call(ModelLibrary(PROVIDER, read_model), count_rows)),
    ("WhisperModel.__init__", _patch_init), ("WhisperModel.transcribe", _patch_transcribe),
    (f"{_BATCHED}.transcribe", _patch_transcribe), ("WhisperModel.encode", _patch_encode),
    ("WhisperModel.generate_with_fallback", _patch_decode(_count_window)),
    (f"{_BATCHED}.generate_segment_batched", _patch_decode(_count_batch)),
):  # fmt: skip
    instrumentor.patch_hot_path(f"{_MODULE}:{_path}")(_make)
