"""Hooks in the API server until a request is handed to the engine core; `output_processor` has the others.

    tokenize ─▶ OutputProcessor.add_request ─▶ client.add_request ─▶ …
    a stage     bound to its request           submitted

The request comes from the context in which the handler runs. Offline (`LLM.generate`, `AsyncLLM` in a script)
each prompt is a request, which ends with its last sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.vllm._instrumentor import (
    ENGINE,
    OFFLINE_NAME,
    REQUESTS,
    SERVED_NAME,
    TOKENIZING,
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


def _make_render_probe(operation: str) -> Callable[[Call], Generator[None, Any, None]]:
    def trace_render(call: Call) -> Generator[None, Any, None]:
        """Records the stage `tokenize`: from messages or text to token ids.

        It includes the chat template and the wait for a tokenizer; both run in vLLM's thread pool.
        """
        request = start.current_request()
        started_at, items = _clock.now(), 0
        if request is None:
            yield
            return
        request.operation, request.tokenizing = operation, True
        if not request.is_named:
            request.expect_operation(operation, ENGINE, model_name(call.instance.model_config))
        try:
            yield
        except BaseException:
            items = events.RAISED
            raise
        finally:
            request.tokenizing = False
            request.record_stage(TOKENIZE, started_at, items)

    return trace_render


def _name_request(request: request_span.RequestSpan, operation: str, model: str, again: bool = False) -> None:
    """Sets operation and model of a server's request once, or with `again` replaces the first, wrong ones."""
    if again or not request.is_named:
        request.is_named = True
        request.set_operation(operation, ENGINE, model)


for _method, _operation in (("render_chat_async", "chat"), ("render_cmpl_async", "text_completion")):
    instrumentor.patch_function(f"{RENDERER}.{_method}", optional=True, part=TOKENIZING)(
        _make_render_probe(_operation)
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


@instrumentor.patch_function(
    f"{OUTPUT_PROCESSOR}.add_request", reads=("request", "parent_req"), part=REQUESTS
)
def trace_add_request(call: Call) -> Generator[None, Any, None]:
    """Binds a new sequence to its request, and samples its detokenizer for that request.

    This is the first call in which vLLM knows the sequence.
    """
    request_id = call["request"].request_id
    is_new = request_id not in in_flight
    prompt_request = _register_sequence(call.instance, call["request"], call["parent_req"])
    try:
        yield
    except BaseException as exc:
        if is_new:
            _close_rejected(request_id, exc)
        raise
    state = call.instance.request_states.get(request_id)
    detokenizer = getattr(state, "detokenizer", None)
    # A streamed input comes in several pieces, which share a detokenizer.
    if prompt_request is not None and detokenizer is not None and request_id not in prompt_request.samples:
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
    caller.record_adapter_tenant(request, lora)
    request_id = str(getattr(sequence, "external_req_id", None) or sequence.request_id)
    request.set_request_id(request_id)
    if request.operation:  # the request came through a route of the API server
        request.set_response_id(response_id(request_id))
    return PromptRequest(request, owns_request, sequences)


def _trace_submit(call: Call) -> Generator[None, Any, None]:
    """Records that a sequence is submitted, in the last call before it leaves the process.

    By now vLLM has dropped `trace_headers` unless its own tracing is on, so ours are added here.
    """
    sequence = call["request"]
    prompt_request = in_flight.get(sequence.request_id)
    is_new = prompt_request is not None and sequence.request_id not in prompt_request.submitted_ids
    if prompt_request is not None:
        _record_submitted(prompt_request, sequence)
    try:
        yield
    except BaseException as exc:
        if is_new:
            _close_rejected(sequence.request_id, exc)
        raise


def _record_submitted(prompt_request: PromptRequest, sequence: Any) -> None:
    """Records the submission of a sequence and adds our headers to it.

    A prompt with several sequences counts once. A streamed prompt arrives in pieces; the last piece is empty.
    """
    request, submitted_ids = prompt_request.request, prompt_request.submitted_ids
    tokens = len(sequence.prompt_token_ids or ())
    if sequence.request_id in submitted_ids:
        if getattr(sequence, "resumable", False):
            request.record_event(
                events.RequestSubmitted(_clock.now(), 0, events.clamp_count(tokens), 0, ENGINE)
            )
        return
    limit = int(getattr(sequence.sampling_params, "max_tokens", 0) or 0)
    request.record_submitted(ENGINE, 1, 0 if submitted_ids else tokens, limit)
    submitted_ids.add(sequence.request_id)
    sequence.trace_headers = {**(sequence.trace_headers or {}), **propagation.inject(request)}


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
    instrumentor.patch_function(f"{CLIENT}:{_path}", reads=("request",), optional=_optional, part=REQUESTS)(
        _trace_submit
    )
