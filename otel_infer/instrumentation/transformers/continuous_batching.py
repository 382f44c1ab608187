"""Hooks that record each step of continuous batching, on the thread of the manager that runs them.

    Scheduler.schedule_batch ─▶ compute_batch ─▶ prepare_batch_update ─▶ finish_request
    scheduled                   timed on device  done                    (see `sequences`)

The end of a step is matched to its start by the step's first future, which the library carries through. With
asynchronous batching two steps are in flight. Tokens scheduled for a sequence that finished meanwhile count
as discarded. Where it was built, `_batches.c` records the frequent steps. Releases before 5.18 count free
blocks, later ones a free share. Before 5.6 a future has no query length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from otel_infer._clock import now
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import suppress_torch
from otel_infer.instrumentation.transformers._instrumentor import ENGINE, instrumentor
from otel_infer.instrumentation.transformers.batch_tracker import BatchTracker
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import recorder

CB = "transformers.generation.continuous_batching"
MANAGER = f"{CB}.continuous_api:ContinuousBatchingManager"
PROCESSOR = f"{CB}.continuous_api:ContinuousBatchProcessor"
SCHEDULER = f"{CB}.scheduler"
PART = "continuous batching"

_is_alive = attrgetter("writer.alive")


class _BatchingLoop(threading.local):
    """The step trackers that the loop on this thread has created.

    `latest`: the tracker of the latest step that may be timed.
    """

    def __init__(self) -> None:
        self.trackers: list[BatchTracker] = []
        self.latest: BatchTracker | None = None


current_loop = _BatchingLoop()


def _create_tracker(scheduler: Any) -> BatchTracker | None:
    writer = recorder.acquire_batch_writer(ENGINE)
    for other in current_loop.trackers:
        other.is_latest = False
    if writer is None:
        current_loop.latest = None
        return None
    tracker = scheduler._otel_infer_batches = BatchTracker(writer, scheduler, _announce_timed_step)
    current_loop.trackers = [*filter(_is_alive, current_loop.trackers), tracker]
    return tracker


def _announce_timed_step(tracker: BatchTracker) -> None:
    """Lets `batch_timing` time the next step, which is one of this tracker."""
    current_loop.latest, tracker.is_latest = tracker, len(current_loop.trackers) == 1
    if tracker.resting_runner is not None:
        tracker.end_rest()


def remove_from_batch(scheduler: Any, state: Any) -> None:
    """Removes a sequence from the scheduler's batch."""
    tracker: BatchTracker | None = getattr(scheduler, "_otel_infer_batches", None)
    if tracker is not None and not tracker.closed:
        tracker.removed.append(state)
        if tracker.in_flight:
            tracker.discard_in_flight(state)
        if not scheduler.active_requests:
            tracker.on_idle()


# ── generation loop ──────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{MANAGER}._run_generation_loop", optional=True, part=PART)
def wrap_run_generation_loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns the batch writers of a loop to the recorder when the loop ends."""

    def run_generation_loop(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            try:
                _close_trackers()
            except Exception as exc:
                hook.mark_failed(exc)

    return run_generation_loop


def _close_trackers() -> None:
    trackers, current_loop.trackers, current_loop.latest = current_loop.trackers, [], None
    for tracker in trackers:
        tracker.close()


for _target in (f"{MANAGER}._run_generation_loop", f"{PROCESSOR}.warmup"):
    instrumentor.patch_hot_path(_target, optional=True, part=PART)(suppress_torch)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _wrap_schedule_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records a composed batch."""

    def schedule_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _record_schedule(self, result, hook)
        return result

    return compile_hook("schedule batch", native, original, hook, schedule_batch, _record_schedule)


def _record_schedule(scheduler: Any, result: Any, hook: Hook) -> None:
    """Records any batch.

    A scheduled state is active, and scheduled once. So the batch is the last one if it has as many members as
    are active, as many as before, nobody was removed, and each gets its next token.
    """
    if not hook.alive:
        return
    try:
        if not (futures := result[0]):
            return
        tracker: Any = getattr(scheduler, "_otel_infer_batches", None)
        if tracker is None or tracker.closed or not tracker.writer.alive:
            tracker = _create_tracker(scheduler)
            if tracker is None:
                return
        active, size, tokens = scheduler.active_requests, len(futures), result[2]
        is_decode = tokens == size and futures[-1].has_new_token and not scheduler._requests_to_fork
        total, waiting = tracker.kv_total, len(scheduler.waiting_requests)
        used = total - round(tracker.read_free() * tracker.free_scale)
        at, last, step = now(), tracker.last_states, 0
        if at >= tracker.timing_due_at:
            _announce_timed_step(tracker)
        if is_decode and size == len(active) == len(last) and not tracker.removed:
            step = tracker.writer.write_unchanged(size, used, total, size, waiting, at)
        if step:
            tracker.add_flight(step, futures[0], last)
        else:
            tracker.record_changed(
                active, futures, tokens, is_decode, (used, total, len(active), waiting), at
            )
    except Exception as exc:
        hook.mark_failed(exc)


for _class in ("FIFOScheduler", "PrefillFirstScheduler"):
    instrumentor.patch_hot_path(f"{SCHEDULER}:{_class}.schedule_batch", part=PART)(_wrap_schedule_batch)


@instrumentor.patch_hot_path(f"{CB}.input_outputs:ContinuousBatchingIOs.prepare_batch_update", part=PART)
def wrap_prepare_batch_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records the end of a step: its tokens are on the host and not yet delivered to any sequence."""

    def prepare_batch_update(self: Any) -> Any:
        result = original(self)
        _record_update(self, result, hook)
        return result

    return compile_hook("batch update", native, original, hook, prepare_batch_update, _record_update)


def _record_update(outputs: Any, result: Any, hook: Hook) -> None:
    """Records the end of any step."""
    if not hook.alive:
        return
    try:
        if futures := result[0]:
            for tracker in current_loop.trackers:
                if tracker.in_flight:
                    tracker.record_done(futures[0])
    except Exception as exc:
        hook.mark_failed(exc)
