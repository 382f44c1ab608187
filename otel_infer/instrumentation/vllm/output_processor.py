"""The API server, on the way back: tokens become text, and a sequence ends.

    … ─▶ OutputProcessor.process_outputs ─▶ detokenizer.update* ─▶ _finish_request
         given up, stopped                  token reached          the last one ends what is nobody else's

The output handler works for all requests at once: a detokenizer carries its request.
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
"""Of the outputs that are being processed: the detokenizers of sequences that met a stop string."""
_engine_failures: dict[str, str] = {}
"""And whom the engine gave up by itself (a pause, a prompt that it cannot process), and as what."""


def _wrap_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Once per request and step: two clock readings and an addition. A request may end without a token."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = getattr(self, "otel_infer", None)
        if request is None:
            return original(self, *args, **kwargs)
        started_at = _clock.now()
        met = original(self, *args, **kwargs)
        request.detokenize_ns += _clock.now() - started_at
        if not request.tokens_reached and (args[0] if args else kwargs.get("new_token_ids")):
            request.record_token_reached()
        if met is not None:
            _stopped[self.otel_infer_id] = self
        return met

    return update


# One class makes text, and one is for whoever wants tokens alone (beams, a server of tokens).
instrumentor.patch_hot_path(f"{DETOKENIZER}:BaseIncrementalDetokenizer.update", part=REQUESTS)(_wrap_update)
instrumentor.patch_hot_path(f"{DETOKENIZER}:IncrementalDetokenizer.update", optional=True, part=REQUESTS)(
    _wrap_update
)


@instrumentor.patch_hot_path(
    f"{OUTPUT_PROCESSOR}.process_outputs", reads=("engine_core_outputs",), part=REQUESTS
)
def wrap_process_outputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Who met a stop string is done here, while the engine core is told to abort it; whom the core gave up is told of by nobody
    else."""

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                for one in filter(_get_finish_reason, engine_core_outputs):
                    if (reason := str(one.finish_reason)) in FAILURE_REASONS:
                        _engine_failures[one.request_id] = reason
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
    """What follows the stop string was made and is thrown away, here and in the engine."""
    kept = len(detokenizer.output_token_ids)
    detokenizer.otel_infer.record_event(events.EngineFinished(_clock.now(), "stop", kept))


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
    """Whoever is aborted is forgotten here before the engine core hears of it."""

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


def _end_sequence(request_id: str, given_up: str) -> None:
    """A sequence is over in this process. `given_up`: as what, if it is; of an error the core says so, if it knew the request."""
    asked = in_flight.pop(request_id, None)
    if asked is None:
        return
    if given_up == "abort":
        asked.request.record_event(events.EngineFinished(_clock.now(), "abort", 0))
    asked.remaining -= 1
    if asked.owns_request and asked.remaining <= 0:
        outcomes = {"abort": events.ABORTED, "error": events.ERROR}
        asked.request.close(outcomes.get(given_up, events.OK))


@instrumentor.patch_hot_path(f"{OUTPUT_PROCESSOR}.propagate_error", part=REQUESTS)
def wrap_propagate_error(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """The engine died: everybody is told."""

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
        asked = in_flight.pop(request_id, None)
        if asked is not None:
            asked.request.set_engine_error(error_type)
            if asked.owns_request:
                asked.request.close(events.ERROR, error_type)
