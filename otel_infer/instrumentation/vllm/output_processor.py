"""Hooks in the API server for the outputs of the engine core: tokens become text, and a sequence ends.

    OutputProcessor.process_outputs ─▶ detokenizer.update* ─▶ _finish_request
    failed, stopped                    token reached          an offline request closes

One output handler serves all requests. Each detokenizer therefore carries its request.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm._instrumentor import REQUESTS, instrumentor
from otel_infer.instrumentation.vllm.api_server import OUTPUT_PROCESSOR, in_flight
from otel_infer.ringbuffer import events

DETOKENIZER = "vllm.v1.engine.detokenizer"
FAILURE_REASONS = ("abort", "error")

_get_finish_reason = attrgetter("finish_reason")

_stopped: dict[str, Any] = {}
"""Detokenizers by sequence id, where a sequence met a stop string in the outputs being processed."""
_engine_failures: dict[str, str] = {}
"""Finish reasons (`abort`, `error`) by sequence id, in the outputs being processed, where the engine ended it
itself.

Examples: the engine is paused, or it cannot process the prompt.
"""


def _wrap_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Adds the time of a call to the request's detokenize time, and records its first token.

    It runs once per request and step, so it costs two clock readings and an addition. A request may end
    without a token.
    """

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = getattr(self, "otel_infer", None)
        if request is None or not hook.alive:
            return original(self, *args, **kwargs)
        started_at = _clock.now()
        stop_string = original(self, *args, **kwargs)
        request.detokenize_ns += _clock.now() - started_at
        try:
            if not request.tokens_reached and (args[0] if args else kwargs.get("new_token_ids")):
                request.record_token_reached()
            if stop_string is not None:
                _stopped[self.otel_infer_id] = self
        except Exception as exc:
            hook.mark_failed(exc)
        return stop_string

    return update


# The first class makes text. The second serves requests for token ids alone, such as beam search.
instrumentor.patch_hot_path(f"{DETOKENIZER}:BaseIncrementalDetokenizer.update", part=REQUESTS)(_wrap_update)
instrumentor.patch_hot_path(f"{DETOKENIZER}:IncrementalDetokenizer.update", optional=True, part=REQUESTS)(
    _wrap_update
)


@instrumentor.patch_hot_path(
    f"{OUTPUT_PROCESSOR}.process_outputs", reads=("engine_core_outputs",), part=REQUESTS
)
def wrap_process_outputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records sequences that end on a stop string, and notes sequences that the engine core ended itself.

    A stop string is found here. The engine core then gets an abort, although the sequence finished normally.
    If the engine core aborts a sequence itself, only its output here shows that.
    """

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                for output in filter(_get_finish_reason, engine_core_outputs):
                    if (reason := str(output.finish_reason)) in FAILURE_REASONS:
                        _engine_failures[output.request_id] = reason
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(self, engine_core_outputs, *args, **kwargs)
        if _stopped:
            try:
                for request_id in result.reqs_to_abort if hook.alive else ():
                    if request_id in _stopped:
                        _record_stop(_stopped[request_id])
            except Exception as exc:
                hook.mark_failed(exc)
            _stopped.clear()
        _engine_failures.clear()
        return result

    return process_outputs


def _record_stop(detokenizer: Any) -> None:
    """Records the end of a sequence on a stop string; vLLM discards the tokens generated after it."""
    tokens = len(detokenizer.output_token_ids)
    detokenizer.otel_infer.record_event(events.EngineFinished(_clock.now(), "stop", tokens))


@instrumentor.patch_hot_path(f"{OUTPUT_PROCESSOR}._finish_request", reads=("req_state",), part=REQUESTS)
def wrap_finish_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish_request(self: Any, req_state: Any) -> Any:
        result = original(self, req_state)
        if hook.alive:
            try:
                _end_sequence(req_state.request_id, _engine_failures.get(req_state.request_id, ""))
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return finish_request


@instrumentor.patch_hot_path(f"{OUTPUT_PROCESSOR}.abort_requests", part=REQUESTS)
def wrap_abort_requests(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records aborted sequences, because vLLM drops their state before it aborts them in the engine core."""

    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = original(self, *args, **kwargs)
        if hook.alive:
            try:
                for request_id in aborted:
                    _end_sequence(request_id, "abort")
            except Exception as exc:
                hook.mark_failed(exc)
        return aborted

    return abort_requests


def _end_sequence(request_id: str, failure: str) -> None:
    """Removes a sequence that is over in this process; the last one closes an offline request.

    `failure`: `abort`, `error`, or "" for a normal end. For an error the engine core records the finish
    itself, if it had received the request.
    """
    prompt_request = in_flight.pop(request_id, None)
    if prompt_request is None:
        return
    if failure == "abort":
        prompt_request.request.record_event(events.EngineFinished(_clock.now(), "abort", 0))
    prompt_request.remaining -= 1
    if prompt_request.owns_request and prompt_request.remaining <= 0:
        outcomes = {"abort": events.ABORTED, "error": events.ERROR}
        prompt_request.request.close(outcomes.get(failure, events.OK))


@instrumentor.patch_hot_path(f"{OUTPUT_PROCESSOR}.propagate_error", part=REQUESTS)
def wrap_propagate_error(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records a failure of the engine on all requests in flight."""

    def propagate_error(self: Any, e: Any) -> Any:
        if hook.alive:
            try:
                _fail_requests(list(self.request_states), type(e).__qualname__)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, e)

    return propagate_error


def _fail_requests(request_ids: list[str], error_type: str) -> None:
    for request_id in request_ids:
        prompt_request = in_flight.pop(request_id, None)
        if prompt_request is not None:
            prompt_request.request.set_engine_error(error_type)
            if prompt_request.owns_request:
                prompt_request.request.close(events.ERROR, error_type)
