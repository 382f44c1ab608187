"""Hooks for `transformers serve`: operation of a route, queue of the generating thread, and streamed tokens.

    Handler ─▶ GenerateManager ─▶ InferenceThread.submit ─▶ (queue) ─▶ generate ─▶ DirectStreamer.put ─▶ SSE
               submitted                                    received

With continuous batching:

    Handler ─▶ add_request (see `sequences`) ─▶ CBStreamer.put ─▶ SSE
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.detokenize_sample import SAMPLED_OUTPUTS, DetokenizeSample
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.thread_context import ThreadContext
from otel_infer.instrumentation.transformers._instrumentor import (
    CANCELLED,
    ENGINE,
    already_submitted,
    instrumentor,
    wrap_in_empty_context,
)
from otel_infer.instrumentation.transformers.compiled_requests import compile_request_hook
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start

_SERVING = "transformers.cli.serving"
PART = "serve"
OPERATIONS = {
    "chat_completion:ChatCompletionHandler": ("chat", ""),
    "completion:CompletionHandler": ("text_completion", ""),
    "response:ResponseHandler": ("chat", "resp_"),
}
"""For each handler: the operation, and the prefix of the response id before the request's id."""


def _make_handler_wrapper(
    operation: str, prefix: str
) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def wrap_handle_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def handle_request(self: Any, body: Any, request_id: str) -> Any:
            request = start.current_request()
            if request is not None and hook.alive:
                try:
                    request.operation = operation
                    request.set_response_id(f"{prefix}{request_id}")
                except Exception as exc:
                    hook.mark_failed(exc)
            return original(self, body, request_id)

        return compile_request_hook("handle request", original, hook, handle_request, (operation, prefix))

    return wrap_handle_request


for _path, _arguments in OPERATIONS.items():
    instrumentor.patch_hot_path(
        f"{_SERVING}.{_path}.handle_request",
        reads=("body", "request_id"),
        optional=_path.startswith("completion:"),
        part=PART,
    )(_make_handler_wrapper(*_arguments))


def _wrap_manager_generate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records the submission, because the prompt's tokens are known here; the queue gets only a closure."""

    def generate_with_manager(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *rest: Any, **more: Any
    ) -> Any:
        request = start.current_request()
        if request is not None and hook.alive:
            try:
                ids = inputs.get("input_ids")
                tokens = int(ids.numel()) if ids is not None else 0
                request.record_submitted(ENGINE, 1, tokens, gen_config.max_new_tokens)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, model, processor, inputs, gen_config, *rest, **more)

    return generate_with_manager


for _name in ("generate_streaming", "generate_non_streaming"):
    instrumentor.patch_hot_path(
        f"{_SERVING}.utils:GenerateManager.{_name}",
        reads=("model", "processor", "inputs", "gen_config"),
        part=PART,
    )(_wrap_manager_generate)


def _wrap_submit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = start.current_request() if hook.alive else None
        if request is None:
            return original(self, fn, *args, **kwargs)
        try:
            if not request.engine:
                request.record_submitted(ENGINE)
            fn = _bind_to_request(request, fn)
        except Exception as exc:
            hook.mark_failed(exc)
        return original(self, fn, *args, **kwargs)

    return submit


def _bind_to_request(request: request_span.RequestSpan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` bound to the request's context; its call records that the engine received the request."""
    context = ThreadContext(request).add_variable(already_submitted, True)

    def run_in_request(*args: Any, **kwargs: Any) -> Any:
        request.record_event(events.RequestReceived(_clock.now()))
        return context.run(fn, *args, **kwargs)

    return run_in_request


instrumentor.patch_hot_path(f"{_SERVING}.utils:InferenceThread.__init__", part=PART)(wrap_in_empty_context)
for _name in ("submit", "async_submit"):
    instrumentor.patch_hot_path(f"{_SERVING}.utils:InferenceThread.{_name}", reads=("fn",), part=PART)(
        _wrap_submit
    )


def _wrap_streamer_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init_streamer(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.alive:
            try:
                self._otel_infer, self._otel_infer_sample = start.current_request(), DetokenizeSample()
            except Exception as exc:
                hook.mark_failed(exc)

    return compile_request_hook("streamer", original, hook, init_streamer)


def _wrap_streamer_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Times the first calls with tokens, a sample of detokenizing, and records the first token.

    Then the streamer gets the library's own `put` as an attribute, so that no frame of ours is entered per
    token. `end` removes it.
    """

    def put(self: Any, value: Any) -> Any:
        request = getattr(self, "_otel_infer", None)
        if request is None or not hook.alive:
            return original(self, value)
        started_at = _clock.now()
        try:
            result = original(self, value)
        except Exception as exc:
            if type(exc).__name__ != CANCELLED:
                request.set_engine_error(type(exc).__qualname__)
            raise
        try:
            sample, tokens = self._otel_infer_sample, self.total_tokens
            if tokens > sample.tokens:  # the first `put` may be the prompt
                if not request.tokens_reached:
                    request.record_token_reached()
                spent_ns, outputs = _clock.now() - started_at, sample.ns_per_token
                # As `add_output`, without its call: the first outputs of many streams are timed.
                sample.spent_ns += spent_ns
                outputs.append(spent_ns / (tokens - sample.tokens))
                sample.tokens = tokens
                if len(outputs) >= SAMPLED_OUTPUTS and type(self).put is installed:
                    self.put = MethodType(original, self)
        except Exception as exc:
            hook.mark_failed(exc)
        return result

    installed = compile_request_hook("put", original, hook, put)
    return installed


def _wrap_streamer_end(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Adds the estimated time of detokenizing to the request."""

    def end(self: Any) -> Any:
        vars(self).pop("put", None)  # it refers to the streamer, which only the garbage collector would free
        request = getattr(self, "_otel_infer", None)
        result = original(self)
        if request is not None and hook.alive:
            try:
                sample = self._otel_infer_sample
                request.detokenize_ns += sample.spent_ns + sample.estimate_rest(self.total_tokens)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return compile_request_hook("end", original, hook, end)


for _class in ("CBStreamer", "DirectStreamer"):
    _streamer = f"{_SERVING}.utils:{_class}"
    instrumentor.patch_hot_path(f"{_streamer}.__init__", part=PART)(_wrap_streamer_init)
    instrumentor.patch_hot_path(f"{_streamer}.put", part=PART)(_wrap_streamer_put)
    instrumentor.patch_hot_path(f"{_streamer}.end", part=PART)(_wrap_streamer_end)
