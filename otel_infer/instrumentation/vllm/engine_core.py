"""Hooks in the engine core that record the events of each request: received, preempted, finished.

    Socket ─▶ input queue ─▶ Scheduler.add_request ─▶ … ─▶ _free_request
    hidden queue             received                      finished

A request of the scheduler carries its fragment in the attribute `otel_infer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_waits
from otel_infer.instrumentation.vllm._instrumentor import (
    PREEMPTIONS,
    SCHEDULER,
    STEPS,
    has_own_tracing,
    instrumentor,
)
from otel_infer.instrumentation.vllm.scheduler_steps import (
    get_scheduler_steps,
    remove_from_batch,
    update_waiting,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation

FRONTEND_ABORT = "abort"
"""Finish reason of an abort that the API server requested; the API server records the reason itself."""
REASONS_WITH_TOKEN = ("stop", "length", "repetition")
"""Finish reasons of a request that ends with a token; one that fails may end without."""


@instrumentor.patch_hot_path(f"{SCHEDULER}.add_request", reads=("request",), part=STEPS)
def wrap_add_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add_request(self: Any, request: Any) -> Any:
        if hook.alive:
            try:
                _record_received(self, request)
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(self, request)
        if hook.alive:
            try:
                update_waiting(self)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return add_request


def _record_received(scheduler: Any, request: Any) -> None:
    if request.request_id in getattr(scheduler, "requests", ()):
        return  # another piece of a streamed prompt: the request already exists, and is freed once
    fragment = propagation.join_request(getattr(request, "trace_headers", None))
    if fragment is None:
        return
    request.otel_infer = fragment
    if not has_own_tracing(scheduler):
        request.trace_headers = None  # vLLM would send them back with every token, and nothing reads them
    steps = get_scheduler_steps(scheduler)
    if steps is not None:
        steps.writer.handles[request.request_id] = fragment.packed
    fragment.record_event(events.RequestReceived(_clock.now()))


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
    steps = remove_from_batch(scheduler, request.request_id, is_over=True)
    drafts = steps.drafts.pop(request.request_id, None) if steps is not None else None
    reason = str(request.get_finished_reason())
    if steps is not None and reason not in REASONS_WITH_TOKEN:
        steps.ended_early = True
    fragment = getattr(request, "otel_infer", None)
    if fragment is None:
        return
    request.otel_infer, at = None, _clock.now()
    scheduler_waits.record_waits(request, fragment, at)
    if drafts is not None:
        fragment.record_event(events.TokensDrafted(at, *drafts))
    if reason != FRONTEND_ABORT:
        fragment.record_event(events.EngineFinished(at, reason, int(request.num_output_tokens)))
    propagation.release(fragment)


@instrumentor.patch_hot_path(f"{SCHEDULER}._preempt_request", reads=("request",), part=PREEMPTIONS)
def wrap_preempt_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        if hook.alive:
            try:
                remove_from_batch(self, request.request_id, is_over=False)
                fragment = getattr(request, "otel_infer", None)
                if fragment is not None:
                    fragment.record_event(events.RequestPreempted(_clock.now(), "recompute"))
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return preempt_request
