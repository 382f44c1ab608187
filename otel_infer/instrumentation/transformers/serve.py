"""`transformers serve`: which operation a route is, the queue in front of the generating thread, and the way back.

handler ─▶ GenerateManager ─▶ InferenceThread.submit ─▶ (queue) ─▶ generate ─▶ DirectStreamer.put ─▶ SSE
           submitted                            received
handler ─▶ add_request (see `sequences`) ─▶ CBStreamer.put ─▶ SSE       with continuous batching
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.thread_context import Carried
from otel_infer.instrumentation.transformers._integration import (
    CANCELLED,
    ENGINE,
    apart,
    handed_over,
    integration,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start

_SERVING = "transformers.cli.serving"
PART = "serve"
OPERATIONS = {
    "chat_completion:ChatCompletionHandler": ("chat", ""),
    "completion:CompletionHandler": ("text_completion", ""),
    "response:ResponseHandler": ("chat", "resp_"),
}
"""Of each handler: the operation, and what stands before the request's id in the answer's."""


def _naming(operation: str, prefix: str) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        async def handle_request(self: Any, body: Any, request_id: str) -> Any:
            request = start.current()
            if request is not None and hook.alive:
                try:
                    request.operation = operation
                    request.answers_as(f"{prefix}{request_id}")
                except Exception as exc:
                    hook.fail(exc)
            return await original(self, body, request_id)

        return handle_request

    return make


for _path, _said in OPERATIONS.items():
    integration.step_hook(
        f"{_SERVING}.{_path}.handle_request",
        reads=("body", "request_id"),
        optional=_path.startswith("completion:"),
        part=PART,
    )(_naming(*_said))


def _handing_over(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Here the prompt's tokens are known; what is put into the thread's queue next is a closure."""

    def hand_over(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *rest: Any, **more: Any
    ) -> Any:
        request = start.current()
        if request is not None and hook.alive:
            try:
                ids = inputs.get("input_ids")
                tokens = int(ids.numel()) if ids is not None else 0
                request.submitted(ENGINE, 1, tokens, gen_config.max_new_tokens)
            except Exception as exc:
                hook.fail(exc)
        return original(self, model, processor, inputs, gen_config, *rest, **more)

    return hand_over


for _name in ("generate_streaming", "generate_non_streaming"):
    integration.step_hook(
        f"{_SERVING}.utils:GenerateManager.{_name}",
        reads=("model", "processor", "inputs", "gen_config"),
        part=PART,
    )(_handing_over)


def _queueing(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        request = start.current() if hook.alive else None
        if request is None:
            return original(self, fn, *args, **kwargs)
        if not request.engine:
            request.submitted(ENGINE)
        return original(self, _carried(request, fn), *args, **kwargs)

    return submit


def _carried(request: request_span.LiveRequest, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, run in the request's context; its start is when the engine took the request up."""
    carried = Carried().also(handed_over, True)

    def run(*args: Any, **kwargs: Any) -> Any:
        request.state(events.RequestReceived(_clock.now()))
        return carried.run(fn, *args, **kwargs)

    return run


integration.step_hook(f"{_SERVING}.utils:InferenceThread.__init__", part=PART)(apart)
for _name in ("submit", "async_submit"):
    integration.step_hook(f"{_SERVING}.utils:InferenceThread.{_name}", reads=("fn",), part=PART)(_queueing)


def _made_for(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._otel_infer = start.current()

    return init


def _delivering(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Tokens become text here, one call per token: two clock readings and an addition."""

    def put(self: Any, value: Any) -> Any:
        request = getattr(self, "_otel_infer", None)
        if request is None:
            return original(self, value)
        started_at = _clock.now()
        try:
            result = original(self, value)
        except Exception as exc:
            if type(exc).__name__ != CANCELLED:
                request.failed(type(exc).__qualname__)
            raise
        request.detokenize_ns += _clock.now() - started_at
        if not request.tokens_reached and self.total_tokens:  # the first `put` may be the prompt
            request.token_reached()
        return result

    return put


for _class in ("CBStreamer", "DirectStreamer"):
    integration.step_hook(f"{_SERVING}.utils:{_class}.__init__", part=PART)(_made_for)
    integration.step_hook(f"{_SERVING}.utils:{_class}.put", part=PART)(_delivering)
