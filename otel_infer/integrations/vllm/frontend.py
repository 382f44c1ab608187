"""The API server: a request is rendered, handed to the engine core, and its tokens become text.

    tokenize ─▶ OutputProcessor.add_request ─▶ client.add_request ─▶ … ─▶ detokenizer.update* ─▶ _finish_request
    a stage     whose it is                    submitted                  token reached

Who asked is told by the context that the handler runs in. On the way back the output handler works for all requests at
once: there a detokenizer carries its request. Without a server (`LLM.generate`, `AsyncLLM` in a script) a prompt is a
request of its own, which ends with its last sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from otel_infer import asking, clock, elsewhere, facts, ingress
from otel_infer.integrations.vllm._integration import (
    ENGINE,
    OFFLINE_NAME,
    REQUESTS,
    SERVED_NAME,
    TOKENIZING,
    integration,
    model_name,
    response_id,
)
from otel_infer.patching import Call, Hook

RENDERER = "vllm.renderers.base:BaseRenderer"
CLIENT = "vllm.v1.engine.core_client"
DETOKENIZER = "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer"
OUTPUT = "vllm.v1.engine.output_processor:OutputProcessor"
TOKENIZE = "tokenize"


class Asked:
    """One prompt of a request. `own`: there is no server whose request it belongs to."""

    __slots__ = ("left", "own", "request", "submitted")

    def __init__(self, request: ingress.LiveRequest, own: bool, sequences: int) -> None:
        self.request, self.own, self.left, self.submitted = request, own, sequences, False


_asked: dict[str, Asked] = {}
"""By vLLM's id of a sequence, while it is in flight."""
_stopped: dict[str, ingress.LiveRequest] = {}
"""Sequences that met a stop string in the outputs that are being processed."""


# ── the way in ───────────────────────────────────────────────────────────────────────────────────────────────────


def _rendering(operation: str) -> Callable[[Call], Generator[None, Any, None]]:
    def render(call: Call) -> Generator[None, Any, None]:
        """From messages or text to token ids: the chat template, and a wait for a tokenizer, which run in a pool of threads."""
        request = ingress.current()
        started_at = clock.now()
        if request is None:
            yield
            return
        request.operation, request.tokenizing = operation, True
        _name(request, operation, model_name(call.instance.model_config))
        try:
            yield
        finally:
            request.tokenizing = False
            request.stage(TOKENIZE, started_at)

    return render


def _name(request: ingress.LiveRequest, operation: str, model: str, again: bool = False) -> None:
    """What a server's request is, once, or once more when it turns out to be another."""
    if again or not request.named:
        request.named = True
        request.name(operation, ENGINE, model)


for _method, _operation in (("render_chat_async", "chat"), ("render_cmpl_async", "text_completion")):
    integration.around(f"{RENDERER}.{_method}", optional=True, part=TOKENIZING)(_rendering(_operation))


def _serving(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Whose outputs a processor processes."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.alive:
            try:
                self.output_processor.otel_infer_model = model_name(self.model_config)
            except Exception as exc:
                hook.fail(exc)

    return init


integration.step_hook("vllm.v1.engine.async_llm:AsyncLLM.__init__", part=SERVED_NAME)(_serving)
integration.step_hook("vllm.v1.engine.llm_engine:LLMEngine.__init__", part=OFFLINE_NAME)(_serving)


@integration.around(f"{OUTPUT}.add_request", reads=("request", "parent_req"), part=REQUESTS)
def add_request(call: Call) -> Generator[None, Any, None]:
    """Here a sequence is known for the first time, before its detokenizer is made."""
    asked = _ask(call.instance, call["request"], call["parent_req"])
    token = asked.request.attach() if asked is not None and asked.own else None
    try:
        yield
    finally:
        if token is not None:
            ingress.detach(token)


def _ask(processor: Any, sequence: Any, parent: Any) -> Asked | None:
    found = _asked.get(sequence.request_id)
    if found is not None:  # one more piece of an input that is streamed
        return found
    asked: Asked | None = getattr(parent, "otel_infer", None)
    if asked is None:
        sequences = int(parent.sampling_params.n) if parent is not None else 1
        asked = _first_of(sequence, str(getattr(processor, "otel_infer_model", "")), sequences)
        if parent is not None:
            parent.otel_infer = asked
    if asked is not None:
        _asked[sequence.request_id] = asked
    return asked


def _first_of(sequence: Any, model: str, sequences: int) -> Asked | None:
    """The request that this sequence is the first one of, of so many."""
    lora = getattr(sequence.lora_request, "lora_name", "")
    request = ingress.current()
    operation = request.operation if request is not None else ""
    if sequence.pooling_params is not None:  # rendered as a completion is
        operation = "embeddings"
    operation = operation or "text_completion"
    own, name = request is None, lora or model
    if request is None:
        request = ingress.open_request(
            f"{operation} {name}", owner=ENGINE, operation=operation, provider=ENGINE, model=name
        )
    else:
        _name(request, operation, name, again=bool(lora or sequence.pooling_params is not None))
    if request is None:
        return None
    asking.by_adapter(request, lora)
    request.known_as(response_id(str(getattr(sequence, "external_req_id", None) or sequence.request_id)))
    return Asked(request, own, sequences)


def _submitting(call: Call) -> Generator[None, Any, None]:
    """The last moment before a sequence leaves the process; vLLM has dropped `trace_headers` by now if it does not trace."""
    sequence = call["request"]
    asked = _asked.get(sequence.request_id)
    if asked is not None:
        _submit(asked, sequence)
    yield


def _submit(asked: Asked, sequence: Any) -> None:
    """The prompt of several sequences counts once."""
    request, sampling = asked.request, sequence.sampling_params
    tokens = 0 if asked.submitted else len(sequence.prompt_token_ids or ())
    asked.submitted = True
    request.submitted(ENGINE, 1, tokens, int(getattr(sampling, "max_tokens", 0) or 0))
    sequence.trace_headers = {**(sequence.trace_headers or {}), **elsewhere.headers(request)}


_CLIENTS = {
    "AsyncMPClient.add_request_async": False,
    "DPAsyncMPClient.add_request_async": True,
    "SyncMPClient.add_request": False,
    "InprocClient.add_request": False,
}
for _path, _optional in _CLIENTS.items():
    integration.around(f"{CLIENT}:{_path}", reads=("request",), optional=_optional, part=REQUESTS)(
        _submitting
    )


# ── the way back ─────────────────────────────────────────────────────────────────────────────────────────────────


@integration.step_hook(f"{DETOKENIZER}.__init__", reads=("request",), part=REQUESTS)
def new_detokenizer(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        self.otel_infer_id, self.otel_infer = request.request_id, ingress.current()

    return init


@integration.step_hook(f"{DETOKENIZER}.update", part=REQUESTS)
def update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Once per request and step: two clock readings and an addition."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = getattr(self, "otel_infer", None)
        if request is None:
            return original(self, *args, **kwargs)
        started_at = clock.now()
        met = original(self, *args, **kwargs)
        request.detokenize_ns += clock.now() - started_at
        if not request.tokens_reached:
            request.token_reached()
        if met is not None:
            _stopped[self.otel_infer_id] = request
        return met

    return update


@integration.step_hook(f"{OUTPUT}.process_outputs", part=REQUESTS)
def process_outputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Who met a stop string is done here, while the engine core is told to abort it."""

    def process(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _stopped:
            try:
                for request_id in result.reqs_to_abort if hook.alive else ():
                    if request_id in _stopped:
                        _stopped[request_id].state(facts.EngineFinished(clock.now(), "stop", 0))
            except Exception as exc:
                hook.fail(exc)
            _stopped.clear()
        return result

    return process


@integration.step_hook(f"{OUTPUT}._finish_request", reads=("req_state",), part=REQUESTS)
def finish_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish(self: Any, req_state: Any) -> Any:
        result = original(self, req_state)
        if hook.alive:
            try:
                _left(req_state.request_id, facts.OK)
            except Exception as exc:
                hook.fail(exc)
        return result

    return finish


@integration.step_hook(f"{OUTPUT}.abort_requests", part=REQUESTS)
def abort_requests(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Whoever is aborted is forgotten here before the engine core hears of it."""

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = original(self, *args, **kwargs)
        if hook.alive:
            try:
                for request_id in aborted:
                    _left(request_id, facts.ABORTED)
            except Exception as exc:
                hook.fail(exc)
        return aborted

    return abort


def _left(request_id: str, outcome: int) -> None:
    """A sequence is over in this process."""
    asked = _asked.pop(request_id, None)
    if asked is None:
        return
    if outcome == facts.ABORTED:
        asked.request.state(facts.EngineFinished(clock.now(), "abort", 0))
    asked.left -= 1
    if asked.own and asked.left <= 0:
        asked.request.close(outcome)


@integration.step_hook(f"{OUTPUT}.propagate_error", part=REQUESTS)
def propagate_error(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """The engine died: everybody is told."""

    def propagate(self: Any, e: Any) -> Any:
        if hook.alive:
            try:
                _died(list(self.request_states), type(e).__qualname__)
            except Exception as exc:
                hook.fail(exc)
        return original(self, e)

    return propagate


def _died(request_ids: list[str], error_type: str) -> None:
    for request_id in request_ids:
        asked = _asked.pop(request_id, None)
        if asked is not None:
            asked.request.failed(error_type)
            if asked.own:
                asked.request.close(facts.ERROR, error_type)
