"""Hooks in SGLang's scheduler: a request is received, waits, is retracted and finishes; each batch is a step.

    Req.__init__ ─▶ waiting queue ─▶ run_batch ─▶ process_batch_result ─▶ set_completion_time
    received                         scheduled    done                    finished

With overlap scheduling a batch is composed before the results of the one before are processed, so a step is found by its
`forward_iter`, and tokens that are computed for a request which has finished meanwhile count as discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.sglang._instrumentor import IDS, STATE, STATS, STEPS, instrumentor
from otel_infer.instrumentation.sglang.scheduler_steps import ScheduledRequest, SglangSteps
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


@instrumentor.patch_hot_path("sglang.srt.managers.schedule_batch:Req.__init__", part=STEPS)
def _patch_req(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init_req(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _receive_request, self, kwargs.get("time_stats"))

    return init_req


def _receive_request(req: Any, received: Any) -> None:
    """Joins the request whose ids came with a sequence. `received`: the API server's `time_stats`."""
    ids = getattr(received, IDS, "")
    fragment = propagation.join_request({propagation.REQUEST_HEADER: ids}) if ids else None
    if fragment is not None:
        fragment.record_event(events.RequestReceived(_clock.now()))
        scheduled = ScheduledRequest(req, fragment)
        req.otel_infer_packed = fragment.packed
        setattr(req.time_stats, STATE, scheduled)


def _get_scheduled(time_stats: Any) -> ScheduledRequest | None:
    scheduled: ScheduledRequest | None = time_stats.__dict__.get(STATE)
    return scheduled


def _finish_request(time_stats: Any) -> None:
    """Records the end of a request, and that the batch has lost a member, which may be one without a trace."""
    SglangSteps.note_end()
    scheduled = _get_scheduled(time_stats)
    if scheduled is not None:
        scheduled.finish()


@instrumentor.patch_hot_path(f"{STATS}:SchedulerReqTimeStats.set_completion_time", part=STEPS)
def _patch_completion(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def set_completion_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            call_safely(hook, _finish_request, self)
        return original(self, *args, **kwargs)

    return set_completion_time


@instrumentor.patch_hot_path(f"{STATS}:SchedulerReqTimeStats.set_retract_time", part=STEPS)
def _patch_retract(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def set_retract_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = _get_scheduled(self) if hook.alive else None
        if scheduled is not None:
            call_safely(hook, scheduled.retract)
        return original(self, *args, **kwargs)

    return set_retract_time


@instrumentor.patch_hot_path(
    f"{SCHEDULER}._release_aborted_request", reads=("req",), optional=True, part=STEPS
)
def _patch_release(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a request that is aborted while it waits. SGLang 0.5.20 and later."""

    def release_aborted_request(self: Any, req: Any) -> Any:
        scheduled = _get_scheduled(req.time_stats) if hook.alive else None
        if scheduled is not None:
            call_safely(hook, scheduled.finish, "abort")
        return original(self, req)

    return release_aborted_request


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{SCHEDULER}.run_batch", reads=("batch",), part=STEPS)
def _patch_run_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            call_safely(hook, SglangSteps.record_scheduled, self, batch)
        return original(self, batch, *args, **kwargs)

    return run_batch


@instrumentor.patch_hot_path(f"{SCHEDULER}.process_batch_result", reads=("batch", "result"), part=STEPS)
def _patch_process_result(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def process_batch_result(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        delivered = call_safely(hook, SglangSteps.begin_processing, self, batch) if hook.alive else None
        processed = original(self, batch, result, *args, **kwargs)
        if delivered is not None:
            call_safely(hook, SglangSteps.record_done, self, delivered, batch)
        return processed

    return process_batch_result
