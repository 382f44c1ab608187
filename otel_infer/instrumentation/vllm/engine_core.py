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
from otel_infer.instrumentation.vllm._integration import PREEMPTIONS, SCHEDULER, STEPS, integration
from otel_infer.instrumentation.vllm.scheduler import batches_of, left_batch
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation

BY_FRONT_END = "abort"
"""A finish that the front end asked for, and knows the reason of."""


@integration.step_hook(f"{SCHEDULER}.add_request", reads=("request",), part=STEPS)
def add_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add(self: Any, request: Any) -> Any:
        if hook.alive:
            try:
                _received(self, request)
            except Exception as exc:
                hook.fail(exc)
        return original(self, request)

    return add


def _received(scheduler: Any, request: Any) -> None:
    if request.request_id in getattr(scheduler, "requests", ()):
        return  # one more piece of a prompt that is streamed in: the request is there already, and is freed once
    part = propagation.part(getattr(request, "trace_headers", None))
    if part is None:
        return
    request.otel_infer = part
    if not getattr(getattr(scheduler, "observability_config", None), "otlp_traces_endpoint", True):
        request.trace_headers = None  # else they come back with every token, to nobody
    batches = batches_of(scheduler)
    if batches is not None:
        batches.log.handles[request.request_id] = part.packed
    part.state(events.RequestReceived(_clock.now()))


@integration.step_hook(f"{SCHEDULER}._free_request", reads=("request",), part=STEPS)
def free_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def free(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                _finished(self, request)
            except Exception as exc:
                hook.fail(exc)
        return original(self, request, *args, **kwargs)

    return free


def _finished(scheduler: Any, request: Any) -> None:
    batches = left_batch(scheduler, request.request_id, is_over=True)
    drafts = batches.drafts.pop(request.request_id, None) if batches is not None else None
    part = getattr(request, "otel_infer", None)
    if part is None:
        return
    request.otel_infer, at = None, _clock.now()
    scheduler_waits.over(request, part, at)
    if drafts is not None:
        part.state(events.TokensDrafted(at, *drafts))
    reason = str(request.get_finished_reason())
    if reason != BY_FRONT_END:
        part.state(events.EngineFinished(at, reason, int(request.num_output_tokens)))
    propagation.left(part)


@integration.step_hook(f"{SCHEDULER}._preempt_request", reads=("request",), part=PREEMPTIONS)
def preempt_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        if hook.alive:
            try:
                left_batch(self, request.request_id, is_over=False)
                part = getattr(request, "otel_infer", None)
                if part is not None:
                    part.state(events.RequestPreempted(_clock.now(), "recompute"))
            except Exception as exc:
                hook.fail(exc)
        return result

    return preempt
