"""Hooks for tokenizers: text to tokens is the stage `tokenize`, tokens to text is detokenize time.

Only the outermost call counts, because `apply_chat_template` calls the tokenizer and `batch_decode` calls
`decode`. Calls without a current request are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.context_hooks import compile_tokenizer, tokenizer_call
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.thread_counters import record_thread_run
from otel_infer.instrumentation.transformers._instrumentor import ENGINE, instrumentor
from otel_infer.instrumentation.transformers.generation_run import compiled_state, thread_state
from otel_infer.ringbuffer import events
from otel_infer.tracing import context, start
from otel_infer.tracing.request_span import REQUEST_KEY

_TOKENIZER = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
_PROCESSOR = "transformers.processing_utils:ProcessorMixin"
_current = None if context.variable is None else (context.variable, REQUEST_KEY)
"""Where compiled code finds the current request."""


def _wrap_tokenize(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def tokenize_input(*args: Any, **kwargs: Any) -> Any:
        if tokenizer_call.busy or not hook.alive:
            return original(*args, **kwargs)
        request = start.current_request()
        if request is None or request.tokenizing:
            return original(*args, **kwargs)
        started_at = _clock.now()
        tokenizer_call.busy = True
        try:
            result = original(*args, **kwargs)
        except BaseException:
            request.record_stage(events.TOKENIZE, started_at, events.RAISED)
            raise
        finally:
            tokenizer_call.busy = False
        try:
            request.record_stage(events.TOKENIZE, started_at, _token_count(result))
        except Exception as exc:
            hook.mark_failed(exc)
        return result

    return compile_tokenizer(original, hook, tokenize_input, _token_count)


def _wrap_decode(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def decode_tokens(*args: Any, **kwargs: Any) -> Any:
        run = thread_state.run
        if run is not None and run.is_detokenizing_sampled:  # a streamer's, of which the first are timed
            return original(*args, **kwargs)
        request = start.current_request() if hook.alive and not tokenizer_call.busy else None
        if request is None:
            return original(*args, **kwargs)
        started_at = _clock.now()
        tokenizer_call.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            tokenizer_call.busy = False
            if run is None or not run.iterations:
                request.detokenize_ns += _clock.now() - started_at
            else:
                spent_ns = _clock.now() - started_at
                run.is_detokenizing_sampled = run.detokenize_sample.add_output(1, spent_ns)

    return compile_hook("detokenizer", compiled_state, original, hook, decode_tokens, _current)


def _token_count(result: Any) -> int:
    """Returns the number of tokens in a tokenizer's result; 0 for an unknown type of result."""
    named = getattr(result, "data", None)  # of a `BatchEncoding`, whose own methods would be three calls
    named = named if type(named) is dict else result
    ids = named["input_ids"] if hasattr(named, "keys") and "input_ids" in named else result
    if hasattr(ids, "numel"):
        return int(ids.numel())
    if hasattr(ids, "shape"):
        return int(ids.size)
    if isinstance(ids, list):
        return sum(len(row) for row in ids) if ids and isinstance(ids[0], list) else len(ids)
    return 0


for _method in ("__call__", "apply_chat_template", "encode"):
    instrumentor.patch_hot_path(f"{_TOKENIZER}.{_method}", part="tokenizer")(_wrap_tokenize)
for _method in ("decode", "batch_decode"):
    instrumentor.patch_hot_path(f"{_TOKENIZER}.{_method}", part="tokenizer")(_wrap_decode)
instrumentor.patch_hot_path(f"{_PROCESSOR}.apply_chat_template", part="processor")(_wrap_tokenize)


@instrumentor.patch_hot_path("transformers.generation.streamers:TextStreamer.put", part="streamers")
def wrap_streamer_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records the first token at a streamer. The first `put` is the prompt, before any iteration."""

    def put(self: Any, value: Any) -> Any:
        result = original(self, value)
        run = thread_state.run
        if run is not None and run.iterations and hook.alive:
            try:
                run.request.record_token_reached()
                if type(self).put is put:  # no further call of this streamer enters a frame of ours
                    self.put = MethodType(original, self)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return put


@instrumentor.patch_hot_path("transformers.generation.streamers:TextStreamer.end", part="streamers")
def wrap_streamer_end(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Removes what `put` has stored: it refers to the streamer, which only the garbage collector would free.

    Then it records the thread's counters: at the end of a stream the client's request ends, perhaps before `generate` does.
    """

    def end(self: Any) -> Any:
        vars(self).pop("put", None)
        run = thread_state.run
        if run is not None and run.writer is not None and hook.alive:
            try:
                record_thread_run(run.writer, ENGINE)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self)

    return end
