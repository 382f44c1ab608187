"""Hooks in the engine core that record each step: two events per step, on the thread that schedules.

    Scheduler.schedule ─▶ (workers) ─▶ Scheduler.update_from_output
    scheduled                          done

Several steps may be in flight (asynchronous scheduling, pipelines). The `SchedulerOutput` therefore matches
the end of a step to its start. The members of a step are the keys of `num_scheduled_tokens`: running requests
first, then resumed and new requests. Tokens computed for a request that ended meanwhile count as discarded.
Empty steps (polls of a KV connector) and dummy batches (of a rank that keeps pace with its peers) are only
counted.

The hooks run at every step on the thread on which all streams wait, so a usual step is recorded without work per
member: by `_scheduler.c` where it was built. `scheduler_steps` records all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_steps
from otel_infer.instrumentation.vllm._instrumentor import (
    DUMMY_BATCHES,
    EVICTIONS,
    SCHEDULER,
    STEPS,
    instrumentor,
)
from otel_infer.instrumentation.vllm.scheduler_steps import dummy_batches, evictions
from otel_infer.instrumentation.vllm.scheduler_waits import NOTHING_WAITS
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import recorder

ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

_now = _clock.now


@instrumentor.patch_hot_path(f"{SCHEDULER}.schedule", part=STEPS)
def wrap_schedule(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        _record_schedule(self, output, hook)
        return output

    return compile_hook("vllm schedule", native, original, hook, schedule, _record_schedule)


def _record_schedule(scheduler: Any, output: Any, hook: Hook) -> None:
    """Records any composed batch."""
    if not hook.alive:
        scheduler_steps.forget_batch(scheduler)
        return
    try:
        steps = getattr(scheduler, "otel_infer_batches", None)
        # Compiled code has recorded a usual step, unless the waiting requests are to be reported.
        is_known = native and steps is not None and steps.report_due_at == NOTHING_WAITS
        if (
            steps is not None
            and steps.hook is hook
            and not is_known
            and steps.record_usual(scheduler, output)
        ):
            return
        steps = scheduler_steps.get_scheduler_steps(scheduler, hook) if recorder.active else None
        if steps is not None:
            steps.record_scheduled(scheduler, output)
    except Exception as exc:
        hook.mark_failed(exc)


@instrumentor.patch_hot_path(
    f"{SCHEDULER}.update_from_output", reads=("scheduler_output", "model_runner_output"), part=STEPS
)
def wrap_update_from_output(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        at, step = _now(), 0
        steps: Any = getattr(self, "otel_infer_batches", None)
        if steps is not None and hook.alive:
            try:
                ids = getattr(scheduler_output, "otel_infer_step", None)
                if ids is not None:
                    steps.done = step = ids[1]
                    if scheduler_output.scheduled_spec_decode_tokens:
                        steps.count_drafts(scheduler_output, self, model_runner_output)
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        if step:
            _record_update(self, scheduler_output, model_runner_output, result, step, at, hook)
        return result

    return compile_hook("vllm update", native, original, hook, update_from_output, _record_update)


def _record_update(
    scheduler: Any, output: Any, sampled: Any, result: Any, step: int, at: int, hook: Hook
) -> None:
    """Records the end of any step, whose results came at `at`."""
    if not hook.alive:
        return
    try:
        steps: Any = scheduler.otel_infer_batches
        outputs = sum(len(of_client.outputs) for of_client in result.values())
        if (
            outputs == len(output.num_scheduled_tokens)
            and steps.single_tokens
            and not steps.removals
            and not steps.ended_early
            and not sampled.pooler_output
        ):
            steps.writer.write_single_tokens(step, at)
        else:
            steps.record_done(output, at, result.values())
        if not scheduler.running:
            steps.on_idle(scheduler)
    except Exception as exc:
        hook.mark_failed(exc)


@instrumentor.patch_hot_path(f"{BLOCK_POOL}._maybe_evict_cached_block", reads=("block",), part=EVICTIONS)
def evict_cached_block(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Counts evicted blocks; a later step records the count, because vLLM calls this for every block."""

    def evict_cached_block(self: Any, *args: Any, **kwargs: Any) -> Any:
        evicted = original(self, *args, **kwargs)
        if evicted and hook.alive:
            evictions.add()
        return evicted

    return compile_hook("vllm eviction", native, original, hook, evict_cached_block, evictions)


@instrumentor.patch_hot_path(f"{ENGINE_CORE}.execute_dummy_batch", part=DUMMY_BATCHES)
def wrap_execute_dummy_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.alive:
            try:
                dummy_batches.add()
                dummy_batches.flush_if_due(_clock.now())
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return execute_dummy_batch
