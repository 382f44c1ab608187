"""Hooks in a worker that record the duration of each step, by the host's clock and by the device's.

    Worker.execute_model ─▶ Worker.sample_tokens
    begins                  ends

A pooling model samples no tokens, and neither does a pipeline stage before the last: there `execute_model` is
all. The `SchedulerOutput` carries the pid of the engine core and the number of the step.
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
    """Step work of which only device times are recorded here; `RunningStep.record_executed` records the
    host's.
    """

    __slots__ = ()

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Records nothing."""


class RunningStep:
    """A step that a worker has begun. `ended_at`: when the last call for it returned so far, 0 = none has."""

    __slots__ = ("_timing_handle", "ended_at", "started_at", "step")

    def __init__(self, step: tuple[int, int], is_prefill: bool) -> None:
        self._timing_handle = timing.begin(always=is_prefill)
        self.step, self.started_at, self.ended_at = step, _clock.now(), 0

    def mark_launched(self, rank: int, result: Any) -> None:
        """Ends the device timing of a step whose work is launched.

        Where vLLM schedules one step ahead, the host has not yet waited for the device. The result then has
        `get_output`, which fetches the tokens later.
        """
        self.ended_at = _clock.now()
        pid, step = self.step
        work = _DeviceStepWork(ENGINE, pid, rank, step, 0)
        timing.end(self._timing_handle, work, has_waited=not hasattr(result, "get_output"))

    def cancel_timing(self) -> None:
        """Drops the device timing of a step that did not launch all its work."""
        timing.cancel(self._timing_handle)

    def record_executed(self, rank: int) -> None:
        """Records the host's time of the step."""
        pid, step = self.step
        recorder.record_process(events.StepExecuted(self.ended_at, self.started_at, ENGINE, pid, rank, step))


@instrumentor.patch_hot_path(f"{WORKER}.execute_model", reads=("scheduler_output",), part=EXECUTION)
def wrap_execute_model(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(scheduler_output, "otel_infer_step", None)
        if step is None or not hook.alive:
            return original(self, scheduler_output, *args, **kwargs)
        try:
            running = RunningStep(step, bool(scheduler_output.scheduled_new_reqs))
        except Exception as exc:
            hook.mark_failed(exc)
            return original(self, scheduler_output, *args, **kwargs)
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            running.cancel_timing()
            raise
        try:
            unfinished = getattr(self, "otel_infer_begun", None)
            if unfinished is not None:
                unfinished.cancel_timing()
                unfinished.record_executed(self.rank)
            if result is not None:
                running.mark_launched(self.rank, result)
                running.record_executed(self.rank)
            else:
                running.ended_at = _clock.now()
            self.otel_infer_begun = running if result is None else None
        except Exception as exc:
            hook.mark_failed(exc)
        return result

    return execute_model


@instrumentor.patch_hot_path(f"{WORKER}.sample_tokens", part=EXECUTION)
def wrap_sample_tokens(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        running = getattr(self, "otel_infer_begun", None)
        if running is not None and hook.alive:
            try:
                self.otel_infer_begun = None
                running.mark_launched(self.rank, result)
                running.record_executed(self.rank)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return sample_tokens
