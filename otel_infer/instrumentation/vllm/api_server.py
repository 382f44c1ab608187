"""The API server: a request is rendered and handed to the engine core; how it comes back is in `delivery`.

    tokenize ─▶ OutputProcessor.add_request ─▶ client.add_request ─▶ …
    a stage     whose it is                    submitted

Who asked is told by the context that the handler runs in. Without a server (`LLM.generate`, `AsyncLLM` in a script) a
prompt is a request of its own, which ends with its last sequence.
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
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, propagation, request_span, start

RENDERER = "vllm.renderers.base:BaseRenderer"
CLIENT = "vllm.v1.engine.core_client"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
TOKENIZE = "tokenize"


class PromptRequest:
    """One prompt of a request. `own`: there is no server whose request it belongs to. `submitted`: which of its sequences are."""

    __slots__ = ("owns_request", "remaining", "request", "submitted_ids")

    def __init__(self, request: request_span.RequestSpan, own: bool, sequences: int) -> None:
        self.request, self.owns_request, self.remaining = request, own, sequences
        self.submitted_ids: set[str] = set()


in_flight: dict[str, PromptRequest] = {}
"""By vLLM's id of a sequence, while it is in flight."""


def _make_render_probe(operation: str) -> Callable[[Call], Generator[None, Any, None]]:
    def trace_render(call: Call) -> Generator[None, Any, None]:
        """From messages or text to token ids: the chat template, and a wait for a tokenizer, which run in a pool of threads."""
        request = start.current_request()
        started_at = _clock.now()
        if request is None:
            yield
            return
        request.operation, request.tokenizing = operation, True
        _name_request(request, operation, model_name(call.instance.model_config))
        try:
            yield
        finally:
            request.tokenizing = False
            request.record_stage(TOKENIZE, started_at)

    return trace_render


def _name_request(request: request_span.RequestSpan, operation: str, model: str, again: bool = False) -> None:
    """What a server's request is, once, or once more when it turns out to be another."""
    if again or not request.is_named:
        request.is_named = True
        request.set_operation(operation, ENGINE, model)


for _method, _operation in (("render_chat_async", "chat"), ("render_cmpl_async", "text_completion")):
    instrumentor.patch_function(f"{RENDERER}.{_method}", optional=True, part=TOKENIZING)(
        _make_render_probe(_operation)
    )


def _wrap_engine_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Whose outputs a processor processes."""

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
    """Here a sequence is known for the first time, and gets its detokenizer."""
    request_id = call["request"].request_id
    is_new = request_id not in in_flight
    asked = _register_sequence(call.instance, call["request"], call["parent_req"])
    try:
        yield
    except BaseException as exc:
        if is_new:
            _close_rejected(request_id, exc)
        raise
    state = call.instance.request_states.get(request_id)
    detokenizer = getattr(state, "detokenizer", None)
    if asked is not None and detokenizer is not None:
        detokenizer.otel_infer_id, detokenizer.otel_infer = request_id, asked.request


def _register_sequence(processor: Any, sequence: Any, parent: Any) -> PromptRequest | None:
    found = in_flight.get(sequence.request_id)
    if found is not None:  # one more piece of an input that is streamed
        return found
    asked: PromptRequest | None = getattr(parent, "otel_infer", None)
    if asked is None:
        sequences = int(parent.sampling_params.n) if parent is not None else 1
        asked = _new_prompt_request(sequence, str(getattr(processor, "otel_infer_model", "")), sequences)
        if parent is not None:
            parent.otel_infer = asked
    if asked is not None:
        in_flight[sequence.request_id] = asked
    return asked


def _new_prompt_request(sequence: Any, model: str, sequences: int) -> PromptRequest | None:
    """The request that this sequence is the first one of, of so many."""
    lora = getattr(sequence.lora_request, "lora_name", "")
    request = start.current_request()
    operation = request.operation if request is not None else ""
    if sequence.pooling_params is not None:  # rendered as a completion is
        operation = "embeddings"
    operation = operation or "text_completion"
    own, name = request is None, lora or model
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
    if request.operation:  # a route of the API server's
        request.set_response_id(response_id(request_id))
    return PromptRequest(request, own, sequences)


def _trace_submit(call: Call) -> Generator[None, Any, None]:
    """The last moment before a sequence leaves the process; vLLM has dropped `trace_headers` by now if it does not trace."""
    sequence = call["request"]
    asked = in_flight.get(sequence.request_id)
    is_new = asked is not None and sequence.request_id not in asked.submitted_ids
    if asked is not None:
        _record_submitted(asked, sequence)
    try:
        yield
    except BaseException as exc:
        if is_new:
            _close_rejected(sequence.request_id, exc)
        raise


def _record_submitted(asked: PromptRequest, sequence: Any) -> None:
    """The prompt of several sequences counts once; one that is streamed comes in pieces, and its end is one of nothing."""
    request, known = asked.request, asked.submitted_ids
    tokens = len(sequence.prompt_token_ids or ())
    if sequence.request_id in known:
        if getattr(sequence, "resumable", False):
            request.record_event(
                events.RequestSubmitted(_clock.now(), 0, events.clamp_count(tokens), 0, ENGINE)
            )
        return
    limit = int(getattr(sequence.sampling_params, "max_tokens", 0) or 0)
    request.record_submitted(ENGINE, 1, 0 if known else tokens, limit)
    known.add(sequence.request_id)
    sequence.trace_headers = {**(sequence.trace_headers or {}), **propagation.inject(request)}


def _close_rejected(request_id: str, exc: BaseException) -> None:
    """It never got to the engine, and whoever asked is told why."""
    asked = in_flight.pop(request_id, None)
    if asked is not None and asked.owns_request:
        outcome = events.ERROR if isinstance(exc, Exception) else events.ABORTED
        asked.request.close(outcome, type(exc).__qualname__ if outcome == events.ERROR else "cancelled")


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
