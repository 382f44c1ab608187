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
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm._instrumentor import ENGINE, EXECUTION, instrumentor
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

WORKER = "vllm.v1.worker.gpu_worker:Worker"

_now, _begin, _record, _make_tuple = _clock.now, timing.begin, recorder.record_process, events.make_tuple


class _DeviceStepWork(StepWork):
    """Step work of which only device times are recorded here; `_end_step` records the
    host's.
    """

    __slots__ = ()

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Records nothing."""


RunningStep = tuple[int, int, Any, int, int]
"""A step that a worker has begun: pid of its engine core, its number, what `timing.begin` returned, and when
`execute_model` began and returned.
"""


def _end_step(running: RunningStep, rank: int, result: Any, ended_at: int) -> None:
    """Records the host's time of a step whose work is launched, and ends its device timing.

    Where vLLM schedules one step ahead, the host has not yet waited for the device. The result then has
    `get_output`, which fetches the tokens later.
    """
    pid, step, timed, started_at, _ = running
    if not isinstance(timed, int):  # otherwise no device is timed
        work = _DeviceStepWork(ENGINE, pid, rank, step, 0)
        timing.end(timed, work, has_waited=not hasattr(result, "get_output"))
    _record(_make_tuple(events.StepExecuted, (ended_at, started_at, ENGINE, pid, rank, step, 0)))


def _end_unfinished(running: RunningStep, rank: int) -> None:
    """Records the host's time of a step without sampling, as in a pipeline stage before the last."""
    pid, step, timed, started_at, ended_at = running
    timing.cancel(timed)
    _record(_make_tuple(events.StepExecuted, (ended_at, started_at, ENGINE, pid, rank, step, 0)))


@instrumentor.patch_hot_path(f"{WORKER}.execute_model", reads=("scheduler_output",), part=EXECUTION)
def wrap_execute_model(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        ids = getattr(scheduler_output, "otel_infer_step", None)
        if ids is None or not hook.alive:
            return original(self, scheduler_output, *args, **kwargs)
        timed: Any = UNTIMED
        started_at = _now()
        try:
            # Only device times of the timing are used here, so a thread without a device has nothing to begin.
            if started_at >= timing.thread.check_due_at:
                timed = _begin(None, bool(scheduler_output.scheduled_new_reqs))
                started_at = _now()
        except Exception as exc:
            hook.mark_failed(exc)
            return original(self, scheduler_output, *args, **kwargs)
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            timing.cancel(timed)
            raise
        try:
            ended_at, unfinished = _now(), getattr(self, "otel_infer_begun", None)
            if unfinished is not None:
                _end_unfinished(unfinished, self.rank)
            running = *ids, timed, started_at, ended_at
            self.otel_infer_begun = running if result is None else None
            if result is not None:
                _end_step(running, self.rank, result, ended_at)
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
                ended_at, self.otel_infer_begun = _now(), None
                _end_step(running, self.rank, result, ended_at)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return sample_tokens
