"""Hooks in the API server until a request is handed to the engine core; `output_processor` has the others.

    tokenize ─▶ OutputProcessor.add_request ─▶ client.add_request ─▶ …
    a stage     bound to its request           submitted

The request comes from the context in which the handler runs. Offline (`LLM.generate`, `AsyncLLM` in a script)
each prompt is a request, which ends with its last sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.target import check_is_coroutine, read_parameters
from otel_infer.instrumentation.vllm._instrumentor import (
    ENGINE,
    OFFLINE_NAME,
    REQUESTS,
    SERVED_NAME,
    TOKENIZING,
    has_own_tracing,
    instrumentor,
    model_name,
    response_id,
)
from otel_infer.instrumentation.vllm.detokenization import DetokenizationSample
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, propagation, request_span, start
from otel_infer.tracing.outcome import classify_exception

RENDERER = "vllm.renderers.base:BaseRenderer"
CLIENT = "vllm.v1.engine.core_client"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
TOKENIZE = events.TOKENIZE


class PromptRequest:
    """One prompt of a request and its sequences.

    `owns_request`: the request was opened here (offline use), so its last sequence closes it. `remaining`:
    sequences that have not ended. `samples`: of their detokenizers, by id. `submitted_ids`: ids of the
    sequences that were handed to the engine core.
    """

    __slots__ = ("owns_request", "remaining", "request", "samples", "submitted_ids")

    def __init__(self, request: request_span.RequestSpan, owns_request: bool, sequences: int) -> None:
        self.request, self.owns_request, self.remaining = request, owns_request, sequences
        self.submitted_ids: set[str] = set()
        self.samples: dict[str, DetokenizationSample] = {}


in_flight: dict[str, PromptRequest] = {}
"""Prompt requests by vLLM's id of a sequence, while that sequence is in flight."""


def _make_render_hook(operation: str) -> WrapperFactory:
    """Returns the hook for the stage `tokenize`: from messages or text to token ids.

    It includes the chat template and the wait for a tokenizer; both run in vLLM's thread pool.
    """

    def wrap_render(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        check_is_coroutine(original)

        async def render(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = start.current_request() if hook.alive else None
            if request is None:
                return await original(self, *args, **kwargs)
            started_at, items = _clock.now(), 0
            try:
                request.operation, request.tokenizing = operation, True
                if not request.is_named:
                    request.expect_operation(operation, ENGINE, model_name(self.model_config))
            except Exception as exc:
                hook.mark_failed(exc)
            try:
                return await original(self, *args, **kwargs)
            except BaseException:
                items = events.RAISED
                raise
            finally:
                request.tokenizing = False
                request.record_stage(TOKENIZE, started_at, items)

        return render

    return wrap_render


def _name_request(request: request_span.RequestSpan, operation: str, model: str, again: bool = False) -> None:
    """Sets operation and model of a server's request once, or with `again` replaces the first, wrong ones."""
    if again or not request.is_named:
        request.is_named = True
        request.set_operation(operation, ENGINE, model)


for _method, _operation in (("render_chat_async", "chat"), ("render_cmpl_async", "text_completion")):
    instrumentor.patch_hot_path(f"{RENDERER}.{_method}", optional=True, part=TOKENIZING)(
        _make_render_hook(_operation)
    )


def _wrap_engine_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Stores the model's name on the engine's output processor, for requests that are opened there."""

    def init_engine(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.alive:
            try:
                self.output_processor.otel_infer_model = model_name(self.model_config)
            except Exception as exc:
                hook.mark_failed(exc)

    return init_engine


instrumentor.patch_hot_path("vllm.v1.engine.async_llm:AsyncLLM.__init__", part=SERVED_NAME)(_wrap_engine_init)
instrumentor.patch_hot_path("vllm.v1.engine.llm_engine:LLMEngine.__init__", part=OFFLINE_NAME)(
    _wrap_engine_init
)


@instrumentor.patch_hot_path(
    f"{OUTPUT_PROCESSOR}.add_request", reads=("request", "parent_req"), part=REQUESTS
)
def wrap_add_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Binds a new sequence to its request, and samples its detokenizer for that request.

    This is the first call in which vLLM knows the sequence.
    """
    parent_position = read_parameters(None, original)["parent_req"][0] - 2  # behind `self` and `request`

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        prompt_request, is_new = None, False
        if hook.alive:
            try:
                is_new = request.request_id not in in_flight
                parent = args[parent_position] if parent_position < len(args) else kwargs.get("parent_req")
                prompt_request = _register_sequence(self, request, parent)
            except Exception as exc:
                hook.mark_failed(exc)
        try:
            result = original(self, request, *args, **kwargs)
        except BaseException as exc:
            if is_new:
                _close_rejected(request.request_id, exc)
            raise
        if prompt_request is not None and hook.alive:
            try:
                _sample_detokenizer(self, request.request_id, prompt_request)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return add_request


def _sample_detokenizer(processor: Any, request_id: str, prompt_request: PromptRequest) -> None:
    """Samples the detokenizer of a sequence. A streamed input comes in several pieces, which share one."""
    detokenizer = getattr(processor.request_states.get(request_id), "detokenizer", None)
    if detokenizer is not None and request_id not in prompt_request.samples:
        prompt_request.samples[request_id] = DetokenizationSample(detokenizer, prompt_request.request)


def _register_sequence(processor: Any, sequence: Any, parent: Any) -> PromptRequest | None:
    known = in_flight.get(sequence.request_id)
    if known is not None:  # another piece of a streamed input
        return known
    prompt_request: PromptRequest | None = getattr(parent, "otel_infer", None)
    if prompt_request is None:
        sequences = int(parent.sampling_params.n) if parent is not None else 1
        prompt_request = _new_prompt_request(
            sequence, str(getattr(processor, "otel_infer_model", "")), sequences
        )
        if parent is not None:
            parent.otel_infer = prompt_request
    if prompt_request is not None:
        in_flight[sequence.request_id] = prompt_request
    return prompt_request


def _new_prompt_request(sequence: Any, model: str, sequences: int) -> PromptRequest | None:
    """Returns the prompt request of a first sequence, out of `sequences`; None while nothing is recorded.

    Opens a request where no server's request is current.
    """
    lora = getattr(sequence.lora_request, "lora_name", "")
    request = start.current_request()
    operation = request.operation if request is not None else ""
    if sequence.pooling_params is not None:  # vLLM renders it like a completion
        operation = "embeddings"
    operation = operation or "text_completion"
    owns_request, name = request is None, lora or model
    if request is None:
        request = start.open_request(
            f"{operation} {name}", owner=ENGINE, operation=operation, provider=ENGINE, model=name
        )
    else:
        _name_request(request, operation, name, again=bool(lora or sequence.pooling_params is not None))
    if request is None:
        return None
    if lora:
        caller.record_adapter_tenant(request, lora)
    request_id = str(getattr(sequence, "external_req_id", None) or sequence.request_id)
    request.set_request_id(request_id)
    if request.operation:  # the request came through a route of the API server
        request.set_response_id(response_id(request_id))
    return PromptRequest(request, owns_request, sequences)


def _wrap_submit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records that a sequence is submitted, in the last call before it leaves the process.

    By now vLLM has dropped `trace_headers` unless its own tracing is on, so ours are added here.
    """

    def record(client: Any, request: Any) -> bool:
        """Returns whether the sequence is new."""
        if not hook.alive:
            return False
        try:
            prompt_request = in_flight.get(request.request_id)
            if prompt_request is None:
                return False
            is_traced = has_own_tracing(getattr(client, "vllm_config", None))
            return _record_submitted(prompt_request, request, is_traced)
        except Exception as exc:
            hook.mark_failed(exc)
            return False

    async def submit_async(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        is_new = record(self, request)
        try:
            return await original(self, request, *args, **kwargs)
        except BaseException as exc:
            if is_new:
                _close_rejected(request.request_id, exc)
            raise

    def submit(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        is_new = record(self, request)
        try:
            return original(self, request, *args, **kwargs)
        except BaseException as exc:
            if is_new:
                _close_rejected(request.request_id, exc)
            raise

    return submit_async if inspect.iscoroutinefunction(original) else submit


def _record_submitted(prompt_request: PromptRequest, sequence: Any, is_traced: bool) -> bool:
    """Records the submission of a sequence and adds our headers to it. Returns whether the sequence is new.

    `is_traced`: vLLM's own tracing reads the headers too. A prompt with several sequences counts once. A streamed prompt arrives in pieces; the last piece is empty.
    """
    request, submitted_ids = prompt_request.request, prompt_request.submitted_ids
    tokens = len(sequence.prompt_token_ids or ())
    if sequence.request_id in submitted_ids:
        if getattr(sequence, "resumable", False):
            request.record_event(
                events.RequestSubmitted(_clock.now(), 0, events.clamp_count(tokens), 0, ENGINE)
            )
        return False
    limit = int(getattr(sequence.sampling_params, "max_tokens", 0) or 0)
    request.record_submitted(ENGINE, 1, 0 if submitted_ids else tokens, limit)
    submitted_ids.add(sequence.request_id)
    sequence.trace_headers = {**(sequence.trace_headers or {}), **propagation.inject(request, is_traced)}
    return True


def _close_rejected(request_id: str, exc: BaseException) -> None:
    """Removes a sequence that never reached the engine core; closes an offline request with the error."""
    prompt_request = in_flight.pop(request_id, None)
    if prompt_request is not None and prompt_request.owns_request:
        prompt_request.request.close(*classify_exception(exc))


_CLIENTS = {
    "AsyncMPClient.add_request_async": False,
    "DPAsyncMPClient.add_request_async": True,
    "SyncMPClient.add_request": False,
    "InprocClient.add_request": False,
}
for _path, _optional in _CLIENTS.items():
    instrumentor.patch_hot_path(f"{CLIENT}:{_path}", reads=("request",), optional=_optional, part=REQUESTS)(
        _wrap_submit
    )
