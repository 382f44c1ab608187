"""Hooks in the engine core that record each step: two events per step, on the thread that schedules.

    Scheduler.schedule ─▶ (workers) ─▶ Scheduler.update_from_output
    scheduled                          done

Several steps may be in flight (asynchronous scheduling, pipelines). The `SchedulerOutput` therefore matches
the end of a step to its start. The members of a step are the keys of `num_scheduled_tokens`: running requests
first, then resumed and new requests. Tokens computed for a request that ended meanwhile count as discarded.
Empty steps (polls of a KV connector) and dummy batches (of a rank that keeps pace with its peers) are only
counted.

The hooks run at every step on the thread on which all streams wait, so a usual step is recorded here, without
work per member. `scheduler_steps` records all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
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
from otel_infer.ringbuffer.recorder import recorder

ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

_now = _clock.now


@instrumentor.patch_hot_path(f"{SCHEDULER}.schedule", part=STEPS)
def wrap_schedule(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not hook.alive:
            scheduler_steps.forget_batch(self)
            return output
        try:
            steps, size = getattr(self, "otel_infer_batches", None), len(output.num_scheduled_tokens)
            if (
                steps is not None
                and size == steps.size
                and size == len(self.running)
                and size == output.total_num_scheduled_tokens
                and steps.hook is hook
                and not output.scheduled_new_reqs
                and not output.scheduled_cached_reqs.resumed_req_ids
                and not steps.removed
            ):
                waiting, total = steps.waiting, steps.total_blocks
                if waiting or steps.waiting_reporter.reasons:
                    steps.waiting_reporter.on_scheduled(self, _now(), waiting)
                used = total - steps.free_blocks.num_free_blocks
                step = steps.write_unchanged(size, used, total, size, waiting)
                if step:
                    steps.scheduled = step
                    output.otel_infer_step = steps.pid, step  # read by the hooks in the workers
                    return output
            _record_scheduled(self, output, hook)
        except Exception as exc:
            hook.mark_failed(exc)
        return output

    return schedule


def _record_scheduled(scheduler: Any, output: Any, hook: Hook) -> None:
    """Records any step, in the slower way."""
    steps = scheduler_steps.get_scheduler_steps(scheduler, hook) if recorder.active else None
    if steps is not None:
        steps.record_scheduled(scheduler, output)


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
        if args or kwargs:  # of a later release
            result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        else:  # costs less
            result = original(self, scheduler_output, model_runner_output)
        if step and hook.alive:
            try:
                outputs = 0
                for of_client in result.values():
                    outputs += len(of_client.outputs)
                if (
                    outputs == len(scheduler_output.num_scheduled_tokens)
                    and steps.single_tokens
                    and not steps.removals
                    and not steps.ended_early
                    and not model_runner_output.pooler_output
                ):
                    steps.write_single_tokens(step, at)
                else:
                    steps.record_done(scheduler_output, at, result.values())
                if not self.running:
                    steps.on_idle(self)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return update_from_output


@instrumentor.patch_hot_path(f"{BLOCK_POOL}._maybe_evict_cached_block", reads=("block",), part=EVICTIONS)
def evict_cached_block(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Counts evicted blocks; a later step records the count, because vLLM calls this for every block."""

    def evict_cached_block(self: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # of a later release
            evicted = original(self, block, *args, **kwargs)
        else:  # costs less
            evicted = original(self, block)
        if evicted and hook.alive:
            evictions.add()
        return evicted

    return evict_cached_block


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
