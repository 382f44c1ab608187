"""Records TensorRT-LLM with its PyTorch executor: the process of the `LLM`, and the first rank's worker.

    GenerationRequest.set_id ─▶ submitted        BaseWorker._enqueue_request ─▶ received
    PyExecutor._forward_step ─▶ scheduled        PyExecutor._update_requests ─▶ done        _terminate_request ─▶ left the batch
    GenerationResultBase._handle_response ─▶ tokens reached this process, finished

With overlap scheduling a next forward pass begins before the results of the one before are processed. By source of its main
branch after 1.4.0rc1, and on stand-ins with its signatures: it was never run, because it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.generation_calls import SharedSteps
from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.guarded_calls import call_before, call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, open_request
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation, request_span, start
from otel_infer.tracing.outcome import classify_exception

PROVIDER = events.TENSORRT_LLM
IDS = "otel_infer_ids"
"""Attribute of a `GenerationRequest`: the ids of the request, which are sent to the worker with it."""
SEQUENCE = "otel_infer_sequence"
"""Attribute of a `GenerationResult`."""
_EXECUTOR = "tensorrt_llm._torch.pyexecutor.py_executor:PyExecutor"
_REQUESTS, _STEPS = "requests", "steps"

instrumentor = Instrumentor(
    "tensorrt_llm",
    "tensorrt-llm",
    ("tensorrt_llm",),
    is_engine=True,
    where={_REQUESTS: "process of the LLM", _STEPS: "worker"},
)


class _Process:
    """What this process knows. `model`: of the `LLM` that it made last. `submitted`: by TensorRT-LLM's client id, until there is a result.

    `running`: requests in the worker, by the same id.
    """

    def __init__(self) -> None:
        self.model = "model"
        self.submitted: dict[int, SubmittedSequence] = {}
        self.running: dict[int, RunningRequest] = {}


_process = _Process()
LIBRARY = ModelLibrary(PROVIDER, lambda model: _process.model, events.OPERATION_TEXT_COMPLETION)
_steps = SharedSteps(LIBRARY)


class SubmittedSequence:
    """A sequence of a request in the process of the `LLM`. `owns_request`: the request was opened for it (offline)."""

    __slots__ = ("is_ended", "owns_request", "request")

    def __init__(self, request: request_span.RequestSpan, owns_request: bool) -> None:
        self.request, self.owns_request, self.is_ended = request, owns_request, False

    def end(self, reason: str, tokens: int, exc: BaseException | None) -> None:
        """Records the end of the sequence, once."""
        if self.is_ended:
            return
        self.is_ended = True
        outcome, error_type = classify_exception(exc)
        self.request.record_event(events.EngineFinished(_clock.now(), reason, tokens))
        if self.owns_request:
            is_cancelled = reason == "cancelled"
            self.request.close(
                *((events.ABORTED, events.CANCELLED) if is_cancelled else (outcome, error_type))
            )
        elif exc is not None:
            self.request.set_engine_error(error_type)


class RunningRequest:
    """A request in the worker, with the fragment of the request that it joins. `steps`, `tokens`: it had so far.

    `llm_request`: TensorRT-LLM's, from its first step on. `counted`: its tokens, with the prompt's, as of its last step.
    """

    __slots__ = ("counted", "fragment", "llm_request", "packed", "steps", "tokens")

    def __init__(self, fragment: propagation.RequestFragment) -> None:
        self.fragment, self.packed, self.llm_request = fragment, fragment.packed, None
        self.steps = self.tokens = self.counted = 0

    def count_new(self) -> int:
        """Returns the number of tokens since the last call."""
        request: Any = self.llm_request
        before, self.counted = self.counted, int(request.get_num_tokens(0))
        return max(self.counted - before, 0)


# ── the process of the LLM ───────────────────────────────────────────────────────────────────────────────────────────


def _note_model(llm: Any, model: Any) -> None:
    _process.model = strip_model_path(str(model))


def _submit_sequence(generation: Any, client_id: int) -> None:
    request, owns_request = start.current_request(), False
    if request is None:
        request, owns_request = open_request(LIBRARY, None, generative=True), True
    elif not request.is_named:
        request.is_named = True
        request.set_operation(request.operation or LIBRARY.operation, PROVIDER, _process.model)
    if request is None:
        return
    limit = getattr(generation.sampling_params, "max_tokens", 0) or 0
    request.record_submitted(PROVIDER, 1, len(generation.prompt_token_ids), limit)
    setattr(generation, IDS, propagation.inject(request, has_readers=False)[propagation.REQUEST_HEADER])
    _process.submitted[client_id] = SubmittedSequence(request, owns_request)


instrumentor.patch_hot_path("tensorrt_llm.llmapi.llm:BaseLLM.__init__", reads=("model",), part=_REQUESTS)(
    call_before(_note_model)
)
# Each kind of executor calls it where a request is submitted.
instrumentor.patch_hot_path("tensorrt_llm.executor.request:GenerationRequest.set_id", part=_REQUESTS)(
    call_before(_submit_sequence)
)


@instrumentor.patch_hot_path(
    "tensorrt_llm.executor.result:GenerationResult.__init__", reads=("generation_request",), part=_REQUESTS
)
def _patch_result(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, generation_request: Any, *args: Any, **kwargs: Any) -> None:
        sequence = _process.submitted.pop(generation_request.id, None)
        if sequence is not None:
            setattr(self, SEQUENCE, sequence)
        original(self, generation_request, *args, **kwargs)

    return init


@instrumentor.patch_hot_path(
    "tensorrt_llm.executor.result:GenerationResultBase._handle_response", reads=("response",), part=_REQUESTS
)
def _patch_response(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def handle_response(self: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        sequence: SubmittedSequence | None = self.__dict__.get(SEQUENCE)
        if sequence is None or not hook.alive:
            return original(self, response, *args, **kwargs)
        try:
            handled = original(self, response, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, sequence.end, "error", 0, exc)
            raise
        call_safely(hook, _note_response, self, sequence)
        return handled

    return handle_response


def _note_response(result: Any, sequence: SubmittedSequence) -> None:
    output = result._outputs[0]
    if output.token_ids:
        sequence.request.record_token_reached()
    if result._done:
        sequence.end(output.finish_reason or "stop", len(output.token_ids or ()), None)


# ── the worker of the first rank ─────────────────────────────────────────────────────────────────────────────────────


def _receive_request(worker: Any, generation: Any) -> None:
    ids = getattr(generation, IDS, "")
    fragment = propagation.join_request({propagation.REQUEST_HEADER: ids}) if ids else None
    if fragment is not None:
        fragment.record_event(events.RequestReceived(_clock.now()))
        _process.running[generation.id] = RunningRequest(fragment)


instrumentor.patch_hot_path(
    "tensorrt_llm.executor.base_worker:BaseWorker._enqueue_request", reads=("request",), part=_STEPS
)(call_before(_receive_request))


@instrumentor.patch_hot_path(f"{_EXECUTOR}._forward_step", reads=("scheduled_requests",), part=_STEPS)
def _patch_forward(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def forward_step(self: Any, scheduled_requests: Any, *args: Any, **kwargs: Any) -> Any:
        is_recorded = hook.alive and bool(_process.running)
        if is_recorded:
            call_safely(hook, _record_scheduled, scheduled_requests)
        outputs = original(self, scheduled_requests, *args, **kwargs)
        if is_recorded and outputs is None:  # it failed, and TensorRT-LLM has handled the error
            call_safely(hook, _steps.cancel_step)
        return outputs

    return forward_step


def _record_scheduled(batch: Any) -> None:
    members, tokens = [], []
    for requests, is_prompt in ((batch.context_requests, True), (batch.generation_requests, False)):
        for request in requests:
            running = _process.running.get(request.py_client_id)
            if running is not None:
                if running.llm_request is None:
                    running.llm_request, running.counted = request, int(request.get_num_tokens(0))
                members.append(running)
                tokens.append(int(request.context_chunk_size) if is_prompt else 1)
    _steps.begin_step(members, tokens)


@instrumentor.patch_hot_path(f"{_EXECUTOR}._update_requests", reads=("sample_state",), part=_STEPS)
def _patch_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update_requests(self: Any, sample_state: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, sample_state, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _record_done)
        return result

    return update_requests


def _record_done() -> None:
    """Ends the first step without results. A chunk of a prompt delivers nothing, accepted drafts several tokens."""
    _steps.end_step([running.count_new() for running in _steps.get_members()])


def _release_request(executor: Any, llm_request: Any) -> None:
    running = _process.running.pop(llm_request.py_client_id, None)
    if running is not None:
        propagation.release(running.fragment)
    if not _process.running:
        _steps.release()


instrumentor.patch_hot_path(f"{_EXECUTOR}._terminate_request", reads=("request",), part=_STEPS)(
    call_before(_release_request)
)
