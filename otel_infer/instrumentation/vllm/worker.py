"""A worker: what it takes for each step, as its host sees it, and as its device does.

    execute_model ─▶ sample_tokens
    begins           ends (a pooling model, and all but the last stage of a pipeline, have no tokens to sample)

Which step of which engine that is comes along with the `SchedulerOutput`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm._instrumentor import ENGINE, EXECUTION, instrumentor
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

WORKER = "vllm.v1.worker.gpu_worker:Worker"


class _DeviceStepWork(StepWork):
    """The host's part is told anyway."""

    __slots__ = ()

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Not again."""


class RunningStep:
    """The step that a worker has begun. `ended_at`: as far as is known."""

    __slots__ = ("_timing_handle", "ended_at", "started_at", "step")

    def __init__(self, step: tuple[int, int], is_prefill: bool) -> None:
        self._timing_handle = timing.begin(always=is_prefill)
        self.step, self.started_at, self.ended_at = step, _clock.now(), 0

    def mark_launched(self, rank: int, result: Any) -> None:
        """All of it is launched. Where vLLM schedules one step ahead, nobody has waited for the device yet: then the result is one
        that is still to be had."""
        self.ended_at = _clock.now()
        pid, step = self.step
        work = _DeviceStepWork(ENGINE, pid, rank, step, 0)
        timing.end(self._timing_handle, work, has_waited=not hasattr(result, "get_output"))

    def cancel_timing(self) -> None:
        """Nobody will say that it is launched."""
        timing.cancel(self._timing_handle)

    def record_executed(self, rank: int) -> None:
        """States it."""
        pid, step = self.step
        recorder.record_process(events.StepExecuted(self.ended_at, self.started_at, ENGINE, pid, rank, step))


@instrumentor.patch_hot_path(f"{WORKER}.execute_model", reads=("scheduler_output",), part=EXECUTION)
def wrap_execute_model(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(scheduler_output, "otel_infer_step", None)
        if step is None or not hook.alive:
            return original(self, scheduler_output, *args, **kwargs)
        try:
            begun = RunningStep(step, bool(scheduler_output.scheduled_new_reqs))
        except Exception as exc:
            hook.mark_failed(exc)
            return original(self, scheduler_output, *args, **kwargs)
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            begun.cancel_timing()
            raise
        try:
            before = getattr(self, "otel_infer_begun", None)
            if before is not None:
                before.cancel_timing()
                before.record_executed(self.rank)
            if result is not None:
                begun.mark_launched(self.rank, result)
                begun.record_executed(self.rank)
            else:
                begun.ended_at = _clock.now()
            self.otel_infer_begun = begun if result is None else None
        except Exception as exc:
            hook.mark_failed(exc)
        return result

    return execute_model


@instrumentor.patch_hot_path(f"{WORKER}.sample_tokens", part=EXECUTION)
def wrap_sample_tokens(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        begun = getattr(self, "otel_infer_begun", None)
        if begun is not None and hook.alive:
            try:
                self.otel_infer_begun = None
                begun.mark_launched(self.rank, result)
                begun.record_executed(self.rank)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return sample_tokens
