"""A worker: what it takes for each step, on its own clock, as its host sees it.

    execute_model ─▶ sample_tokens
    begins           ends (a pooling model, and all but the last stage of a pipeline, have no tokens to sample)

Which step of which engine that is comes along with the `SchedulerOutput`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import clock, facts
from otel_infer.integrations.vllm._integration import ENGINE, EXECUTION, integration
from otel_infer.patching import Hook
from otel_infer.ring.recorder import recorder

WORKER = "vllm.v1.worker.gpu_worker:Worker"


class Begun:
    """The step that a worker has begun. `ended_at`: as far as is known."""

    __slots__ = ("ended_at", "started_at", "step")

    def __init__(self, step: tuple[int, int], started_at: int) -> None:
        self.step, self.started_at, self.ended_at = step, started_at, 0

    def tell(self, rank: int) -> None:
        """States it."""
        pid, step = self.step
        recorder.stated(facts.StepExecuted(self.ended_at, self.started_at, ENGINE, pid, rank, step))


@integration.step_hook(f"{WORKER}.execute_model", reads=("scheduler_output",), part=EXECUTION)
def execute_model(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(scheduler_output, "otel_infer_step", None)
        if step is None or not hook.alive:
            return original(self, scheduler_output, *args, **kwargs)
        begun = Begun(step, clock.now())
        result = original(self, scheduler_output, *args, **kwargs)
        try:
            before = getattr(self, "otel_infer_begun", None)
            if before is not None:
                before.tell(self.rank)
            begun.ended_at = clock.now()
            if result is not None:
                begun.tell(self.rank)
            self.otel_infer_begun = begun if result is None else None
        except Exception as exc:
            hook.fail(exc)
        return result

    return execute


@integration.step_hook(f"{WORKER}.sample_tokens", part=EXECUTION)
def sample_tokens(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        begun = getattr(self, "otel_infer_begun", None)
        if begun is not None and hook.alive:
            try:
                self.otel_infer_begun, begun.ended_at = None, clock.now()
                begun.tell(self.rank)
            except Exception as exc:
                hook.fail(exc)
        return result

    return sample
