"""Continuous batching on its device: what a step launches, from mark to mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import ENGINE, instrumentor
from otel_infer.instrumentation.transformers.continuous_batching import CB, PART, current_loop


@instrumentor.patch_hot_path(f"{CB}.model_runner:ModelRunner.compute_batch", optional=True, part=PART)
def wrap_compute_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Launches forward and sampling on a stream of its own."""

    def compute_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches = current_loop.latest
        if batches is None or not batches.in_flight or not hook.alive:
            return original(self, *args, **kwargs)
        begun = None
        try:
            flight = batches.in_flight[-1]
            io = self.inputs_and_outputs
            begun = timing.begin(
                getattr(io, "compute_stream", None), not flight.decode_only, on=getattr(io, "device", None)
            )
        except Exception as exc:
            hook.mark_failed(exc)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            timing.cancel(begun or 0)
            raise
        if begun is not None:
            try:
                timing.end(begun, StepWork(ENGINE, batches.pid, 0, flight.step, batches.writer.number))
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return compute_batch
