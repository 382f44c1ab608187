"""The engine core, request by request: read from the socket, taken up between two steps, freed.

    (socket ─▶ input queue) ─▶ Scheduler.add_request ─▶ … ─▶ _free_request
     hidden queue              received                      finished

A request of the scheduler carries its part as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_waits
from otel_infer.instrumentation.vllm._instrumentor import PREEMPTIONS, SCHEDULER, STEPS, instrumentor
from otel_infer.instrumentation.vllm.scheduler import get_scheduler_steps, remove_from_batch
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation

FRONTEND_ABORT = "abort"
"""A finish that the front end asked for, and knows the reason of."""


@instrumentor.patch_hot_path(f"{SCHEDULER}.add_request", reads=("request",), part=STEPS)
def wrap_add_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add_request(self: Any, request: Any) -> Any:
        if hook.alive:
            try:
                _record_received(self, request)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, request)

    return add_request


def _record_received(scheduler: Any, request: Any) -> None:
    if request.request_id in getattr(scheduler, "requests", ()):
        return  # one more piece of a prompt that is streamed in: the request is there already, and is freed once
    part = propagation.join_request(getattr(request, "trace_headers", None))
    if part is None:
        return
    request.otel_infer = part
    if not getattr(getattr(scheduler, "observability_config", None), "otlp_traces_endpoint", True):
        request.trace_headers = None  # else they come back with every token, to nobody
    batches = get_scheduler_steps(scheduler)
    if batches is not None:
        batches.writer.handles[request.request_id] = part.packed
    part.record_event(events.RequestReceived(_clock.now()))


@instrumentor.patch_hot_path(f"{SCHEDULER}._free_request", reads=("request",), part=STEPS)
def wrap_free_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                _record_finished(self, request)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, request, *args, **kwargs)

    return free_request


def _record_finished(scheduler: Any, request: Any) -> None:
    batches = remove_from_batch(scheduler, request.request_id, is_over=True)
    drafts = batches.drafts.pop(request.request_id, None) if batches is not None else None
    part = getattr(request, "otel_infer", None)
    if part is None:
        return
    request.otel_infer, at = None, _clock.now()
    scheduler_waits.record_waits(request, part, at)
    if drafts is not None:
        part.record_event(events.TokensDrafted(at, *drafts))
    reason = str(request.get_finished_reason())
    if reason != FRONTEND_ABORT:
        part.record_event(events.EngineFinished(at, reason, int(request.num_output_tokens)))
    propagation.release(part)


@instrumentor.patch_hot_path(f"{SCHEDULER}._preempt_request", reads=("request",), part=PREEMPTIONS)
def wrap_preempt_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        if hook.alive:
            try:
                remove_from_batch(self, request.request_id, is_over=False)
                part = getattr(request, "otel_infer", None)
                if part is not None:
                    part.record_event(events.RequestPreempted(_clock.now(), "recompute"))
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return preempt_request
