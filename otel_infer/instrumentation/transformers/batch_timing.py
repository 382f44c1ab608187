"""Hook that times the steps of continuous batching on their device, between two device events."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import ENGINE, instrumentor
from otel_infer.instrumentation.transformers.continuous_batching import CB, PART, current_loop


@instrumentor.patch_hot_path(f"{CB}.model_runner:ModelRunner.compute_batch", optional=True, part=PART)
def wrap_compute_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Times one step. The library launches forward pass and sampling on a separate stream.

    Each step counts for the sample of a device. The host's clock times few: until the next one, the runner
    has the library's own function as an attribute, so that no frame of ours is entered.
    """

    def compute_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = current_loop.latest
        if tracker is None or not tracker.in_flight or not hook.alive or _clock.now() < tracker.timing_due_at:
            return original(self, *args, **kwargs)
        timing_handle: Any = UNTIMED
        try:
            flight = tracker.in_flight[-1]
            io = self.inputs_and_outputs
            timing_handle = timing.begin(
                getattr(io, "compute_stream", None), not flight.decode_only, on=getattr(io, "device", None)
            )
            if timing.is_device_timed:
                tracker.timing_due_at = 0
            else:
                current_loop.latest, tracker.is_latest = None, False
                tracker.timing_due_at = _clock.now() + timing.host_interval_ns
                if type(self).compute_batch is compute_batch:  # else another library has wrapped ours
                    tracker.resting_runner, self.compute_batch = self, MethodType(original, self)
        except Exception as exc:
            hook.mark_failed(exc)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            timing.cancel(timing_handle)
            raise
        if timing_handle != UNTIMED:
            try:
                timing.end(
                    timing_handle, StepWork(ENGINE, tracker.pid, 0, flight.step, tracker.writer.number)
                )
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return compute_batch
