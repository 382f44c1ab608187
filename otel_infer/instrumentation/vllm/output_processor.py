"""Hooks in the API server for the outputs of the engine core: tokens become text, and a sequence ends.

    OutputProcessor.process_outputs ─▶ detokenizer.update ─▶ _finish_request
    stopped                            `detokenization`      failed; an offline request closes

One output handler serves all requests, on the thread of the event loop. So nothing is done per token here, and
per batch of outputs only where a sequence ends in it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm._instrumentor import REQUESTS, instrumentor
from otel_infer.instrumentation.vllm.api_server import OUTPUT_PROCESSOR, in_flight
from otel_infer.instrumentation.vllm.detokenization import DetokenizationSample
from otel_infer.ringbuffer import events

FAILURE_REASONS = ("abort", "error")

_get_finish_reason = attrgetter("finish_reason")


class OutputBatch:
    """Outputs of the engine core in which a sequence ends, while they are processed.

    `ended`: the samples of the sequences that ended so far by id, None without a detokenizer.
    """

    __slots__ = ("_failures", "_outputs", "ended")

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs
        self._failures: dict[str, str] | None = None
        self.ended: dict[str, DetokenizationSample | None] = {}

    def get_failure(self, request_id: str) -> str:
        """Returns the finish reason, `abort` or `error`, if the engine ended this sequence itself; else "".

        Examples: the engine is paused, or it cannot process the prompt.
        """
        if self._failures is None:
            ends = filter(_get_finish_reason, self._outputs)
            reasons = {output.request_id: str(output.finish_reason) for output in ends}
            self._failures = {key: reason for key, reason in reasons.items() if reason in FAILURE_REASONS}
        return self._failures.get(request_id, "")


@instrumentor.patch_hot_path(
    f"{OUTPUT_PROCESSOR}.process_outputs", reads=("engine_core_outputs",), part=REQUESTS
)
def wrap_process_outputs(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records sequences that end on a stop string, and keeps the outputs for sequences that end in them.

    The outputs become an `OutputBatch` at the first end of a sequence, because there is none in most of them.

    A stop string is found here. The engine core then gets an abort, although the sequence finished normally.
    If the engine core aborts a sequence itself, only its output here shows that.
    """

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.otel_infer_outputs = engine_core_outputs
        result = original(self, engine_core_outputs, *args, **kwargs)
        batch, self.otel_infer_outputs = self.otel_infer_outputs, None
        if type(batch) is OutputBatch and hook.alive:
            try:
                for request_id in result.reqs_to_abort:
                    _record_stop(batch.ended.get(request_id))
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return process_outputs


def _record_stop(sample: DetokenizationSample | None) -> None:
    """Records the end of a sequence on a stop string; vLLM discards the tokens generated after it."""
    if sample is not None:
        sample.request.record_event(events.EngineFinished(_clock.now(), "stop", sample.count_tokens()))


@instrumentor.patch_hot_path(f"{OUTPUT_PROCESSOR}._finish_request", reads=("req_state",), part=REQUESTS)
def wrap_finish_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish_request(self: Any, req_state: Any) -> Any:
        result = original(self, req_state)
        if hook.alive:
            try:
                request_id = req_state.request_id
                batch = getattr(self, "otel_infer_outputs", None)
                if batch is None:
                    _end_sequence(request_id, "")
                    return result
                if type(batch) is not OutputBatch:
                    batch = self.otel_infer_outputs = OutputBatch(batch)
                batch.ended[request_id] = _end_sequence(request_id, batch.get_failure(request_id))
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


def _end_sequence(request_id: str, failure: str) -> DetokenizationSample | None:
    """Removes a sequence that is over in this process; the last one closes an offline request.

    `failure`: `abort`, `error`, or "" for a normal end. For an error the engine core records the finish
    itself, if it had received the request. Returns the sample of its detokenizer, None without one.
    """
    prompt_request = in_flight.pop(request_id, None)
    if prompt_request is None:
        return None
    sample = prompt_request.samples.pop(request_id, None)
    if sample is not None:
        sample.add_estimate()
    if failure == "abort":
        prompt_request.request.record_event(events.EngineFinished(_clock.now(), "abort", 0))
    prompt_request.remaining -= 1
    if prompt_request.owns_request and prompt_request.remaining <= 0:
        outcomes = {"abort": events.ABORTED, "error": events.ERROR}
        prompt_request.request.close(outcomes.get(failure, events.OK))
    return sample


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
