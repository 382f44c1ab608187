"""Hooks in SGLang's API server: a sequence is bound to its request, tokenized, sent to the scheduler, and ends.

    TokenizerManager._init_req_state ─▶ _tokenize_one_request ─▶ _send_one_request ─▶ set_first_token_time ─▶ set_finished_time
    bound to its request                `tokenize`               submitted             a token reached         over in this process

The request comes from the context in which the handler runs. Offline (`Engine.generate`) each sequence is a request.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.sglang._instrumentor import ENGINE, IDS, REQUESTS, STATE, STATS, instrumentor
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation, request_span, start
from otel_infer.tracing.outcome import classify_exception

MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_SERVING = "sglang.srt.entrypoints"
HEALTH_CHECK = "HEALTH_CHECK"
"""Begin of the ids of requests by which SGLang checks itself."""
_CONVERT = "_convert_to_internal_request"
OPERATIONS = {
    f"openai.serving_chat:OpenAIServingChat.{_CONVERT}": events.OPERATION_CHAT,
    "openai.serving_responses:OpenAIServingResponses.create_responses": events.OPERATION_CHAT,
    "ollama.serving:OllamaServing.handle_chat": events.OPERATION_CHAT,
    f"openai.serving_completions:OpenAIServingCompletion.{_CONVERT}": events.OPERATION_TEXT_COMPLETION,
    f"openai.serving_embedding:OpenAIServingEmbedding.{_CONVERT}": events.OPERATION_EMBEDDINGS,
    f"openai.serving_rerank:OpenAIServingRerank.{_CONVERT}": events.OPERATION_RERANK,
}
"""The operation of a route, by the function that prepares its prompt."""


class Sequence:
    """A sequence of a request in this process. `owns_request`: the request was opened for it (offline).

    `names`: operation, provider and model. `has_tokens`: it delivers tokens to a reader. `failure`: that its caller got.
    """

    __slots__ = ("failure", "has_tokens", "names", "owns_request", "request")

    def __init__(
        self,
        request: request_span.RequestSpan,
        owns_request: bool,
        names: tuple[str, str, str],
        has_tokens: bool,
    ) -> None:
        self.request, self.owns_request = request, owns_request
        self.names, self.has_tokens = names, has_tokens
        self.failure: BaseException | None = None


def _wrap_convert(operation: str) -> WrapperFactory:
    """Returns the hook that names the operation of an OpenAI route, before the prompt is tokenized."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def convert(*args: Any, **kwargs: Any) -> Any:
            request = call_safely(hook, start.current_request) if hook.alive else None
            if request is not None and not request.operation:
                request.operation = operation
            return original(*args, **kwargs)

        return convert

    return make_wrapper


for _path, _operation in OPERATIONS.items():
    instrumentor.patch_hot_path(f"{_SERVING}.{_path}", optional=True, part="operations")(
        _wrap_convert(_operation)
    )


@instrumentor.patch_hot_path(f"{MANAGER}._init_req_state", reads=("obj",), part=REQUESTS)
def _patch_init_state(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """SGLang calls it with the client's request for a prompt, and without for what it makes of one prompt (`n` > 1)."""

    def init_req_state(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.rid_to_state
        result = original(self, obj, *args, **kwargs)
        is_prompt = bool(args or kwargs)
        if hook.alive and is_prompt:
            several = (getattr(obj, "parallel_sample_num", 1) or 1) > 1
            ids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
            for rid in ids:
                call_safely(hook, _bind_sequence, self, known[rid], rid, not several)
        return result

    return init_req_state


def _bind_sequence(manager: Any, state: Any, rid: str, opens: bool = True) -> Sequence | None:
    """Binds a new sequence to the current request, or to one that is opened for it if `opens`. Returns it."""
    request, owns_request = start.current_request(), False
    if rid.startswith(HEALTH_CHECK) or (request is None and not opens):
        return None
    is_embedding = type(state.obj).__name__ == "EmbeddingReqInput"
    operation = request.operation if request is not None else ""
    operation = operation or (
        events.OPERATION_EMBEDDINGS if is_embedding else events.OPERATION_TEXT_COMPLETION
    )
    model = strip_model_path(str(manager.served_model_name))
    if request is None:
        owns_request = True
        request = start.open_request(
            f"{operation} {model}", owner=ENGINE, operation=operation, provider=ENGINE, model=model
        )
    elif not request.is_named:
        request.expect_operation(operation, ENGINE, model)
    if request is None:
        return None
    request.set_request_id(rid)
    # Offline only a stream is read while it runs.
    has_tokens = not is_embedding and (not owns_request or bool(getattr(state.obj, "stream", False)))
    sequence = Sequence(request, owns_request, (operation, ENGINE, model), has_tokens)
    setattr(state.time_stats, STATE, sequence)
    return sequence


@instrumentor.patch_hot_path(f"{MANAGER}._tokenize_one_request", reads=("obj",), part=REQUESTS)
def _patch_tokenize(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def tokenize_one_request(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        sequence = _get_sequence(getattr(self.rid_to_state.get(obj.rid), "time_stats", None))
        if sequence is None or not hook.alive:
            return await original(self, obj, *args, **kwargs)
        request, started_at, items = sequence.request, _clock.now(), events.RAISED
        was_tokenizing, request.tokenizing = request.tokenizing, True
        try:
            tokenized = await original(self, obj, *args, **kwargs)
            items = len(tokenized.input_ids or ())
            return tokenized
        finally:
            request.tokenizing = was_tokenizing
            call_safely(hook, request.record_stage, events.TOKENIZE, started_at, items)

    return tokenize_one_request


@instrumentor.patch_hot_path(f"{MANAGER}._release_req_states_on_failure", optional=True, part=REQUESTS)
def _patch_release(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """SGLang calls it with the states of a request that fails, while it handles the exception."""

    def release(self: Any, request_states: Any) -> Any:
        failure = sys.exc_info()[1]
        if hook.alive:
            call_safely(hook, _end_refused, self, dict(request_states), failure)
        return original(self, request_states)

    return release


def _end_refused(manager: Any, states: dict[str, Any], failure: BaseException | None) -> None:
    """Ends the sequences that the scheduler never got. One that it has ends with its last output."""
    is_refused = not any(state.dispatched for state in states.values())
    for rid, state in states.items():
        sequence = _get_sequence(state.time_stats)
        if sequence is None and is_refused:  # several answers, of which none began
            sequence = _bind_sequence(manager, state, rid)
        if sequence is None or not sequence.owns_request:
            continue
        sequence.failure = failure
        if not state.dispatched:
            delattr(state.time_stats, STATE)
            sequence.request.close(*classify_exception(failure))


def _get_sequence(time_stats: Any) -> Sequence | None:
    sequence: Sequence | None = getattr(time_stats, STATE, None)
    return sequence


def _patch_send(read_all: Callable[[Any], list[Any]]) -> WrapperFactory:
    """Returns the hook of a function that sends sequences to the scheduler. `read_all`: returns them from its argument."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        check_is_coroutine(original)

        async def send(self: Any, tokenized: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.alive:
                for one in read_all(tokenized):
                    call_safely(hook, _record_submitted, self, one)
            return await original(self, tokenized, *args, **kwargs)

        return send

    return make_wrapper


_prompts: weakref.WeakKeyDictionary[request_span.RequestSpan, Any] = weakref.WeakKeyDictionary()
"""The last prompt of each request, which counts once, however many answers there are to it."""


def _record_submitted(manager: Any, tokenized: Any) -> None:
    """Records that a sequence is submitted, and adds the ids of its request to what is sent."""
    state = manager.rid_to_state.get(tokenized.rid)
    if state is None or state.time_stats is not tokenized.time_stats:
        return  # before several answers to a prompt, SGLang computes the prompt once, with a copy of the first
    sequence = _get_sequence(tokenized.time_stats) or _bind_sequence(manager, state, tokenized.rid)
    if sequence is None:
        return
    request, limit = sequence.request, getattr(tokenized.sampling_params, "max_new_tokens", None)
    sequence.has_tokens = sequence.has_tokens and limit != 0
    if not request.is_named and not sequence.owns_request:
        request.is_named = True
        request.set_operation(*sequence.names)
    prompt: Any = tokenized.input_ids or ()
    is_repeated = _prompts.get(request) is prompt
    _prompts[request] = prompt
    request.record_submitted(ENGINE, 1, 0 if is_repeated else len(prompt), limit or 0)
    ids = propagation.inject(request, has_readers=False)
    setattr(tokenized.time_stats, IDS, ids[propagation.REQUEST_HEADER])


instrumentor.patch_hot_path(f"{MANAGER}._send_one_request", part=REQUESTS)(_patch_send(lambda one: [one]))
instrumentor.patch_hot_path(f"{MANAGER}._send_batch_request", part=REQUESTS)(_patch_send(list))


@instrumentor.patch_hot_path(f"{STATS}:ReqTimeStatsBase.__getstate__", part=REQUESTS)
def _patch_getstate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Adds the ids to what is sent; the other side takes over all that it gets."""

    def getstate(self: Any) -> Any:
        state = original(self)
        ids = self.__dict__.get(IDS) if hook.alive else None
        if ids:
            state[IDS] = ids
        return state

    return getstate


@instrumentor.patch_hot_path(f"{STATS}:APIServerReqTimeStats.set_first_token_time", part=REQUESTS)
def _patch_first_token(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """SGLang calls it with the first output of a sequence."""

    def set_first_token_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequence = _get_sequence(self) if hook.alive else None
        if sequence is not None and sequence.has_tokens:
            call_safely(hook, sequence.request.record_token_reached)
        return original(self, *args, **kwargs)

    return set_first_token_time


@instrumentor.patch_hot_path(f"{STATS}:APIServerReqTimeStats.set_finished_time", part=REQUESTS)
def _patch_finished(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """SGLang calls it with the last output of a sequence."""

    def set_finished_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequence = self.__dict__.pop(STATE, None)
        if sequence is not None and sequence.owns_request and hook.alive:
            call_safely(hook, sequence.request.close, *classify_exception(sequence.failure))
        return original(self, *args, **kwargs)

    return set_finished_time


@instrumentor.patch_hot_path(f"{MANAGER}._handle_abort_req", reads=("recv_obj",), part=REQUESTS)
def _patch_abort(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Ends a sequence that the scheduler has dropped while it waited."""

    def handle_abort_req(self: Any, recv_obj: Any) -> Any:
        state = self.rid_to_state.get(recv_obj.rid) if hook.alive else None
        sequence = _get_sequence(getattr(state, "time_stats", None))
        if sequence is not None and sequence.owns_request:
            call_safely(hook, sequence.request.close, events.ABORTED, events.CANCELLED)
        return original(self, recv_obj)

    return handle_abort_req
