"""Hooks in the engine core that record each step: two events per step, on the thread that schedules.

    Scheduler.schedule ─▶ (workers) ─▶ Scheduler.update_from_output
    scheduled                          done

Several steps may be in flight (asynchronous scheduling, pipelines). The `SchedulerOutput` therefore matches
the end of a step to its start. The members of a step are the keys of `num_scheduled_tokens`: running requests
first, then resumed and new requests. Tokens computed for a request that ended meanwhile count as discarded.
Empty steps (polls of a KV connector) and dummy batches (of a rank that keeps pace with its peers) are only
counted.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import KvBlockSizeRecorder
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_waits
from otel_infer.instrumentation.vllm._instrumentor import (
    DUMMY_BATCHES,
    ENGINE,
    EVICTIONS,
    REPORT_INTERVAL_NS,
    SCHEDULER,
    STEPS,
    instrumentor,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder

ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

_get_request_id = attrgetter("request_id")
_get_new_tokens = attrgetter("new_token_ids")
_get_outputs = attrgetter("outputs")


class RateLimitedCounter:
    """Counts a frequent occurrence, and records the count under `mark` at most once a second."""

    __slots__ = ("_mark", "_since", "count")

    def __init__(self, mark: str) -> None:
        self._mark, self._since, self.count = mark, 0, 0

    def add(self) -> None:
        """Counts one occurrence; records nothing."""
        self.count += 1

    def flush_if_due(self, at: int) -> None:
        """Records the count once the first counted occurrence was noticed a second or longer ago."""
        self._since = self._since or at
        if at - self._since >= REPORT_INTERVAL_NS:
            self.flush(at)

    def flush(self, at: int) -> None:
        """Records the count if it is above 0, and resets it."""
        if self.count:
            recorder.count(self._mark, self._since or at, at, self.count)
        self._since = self.count = 0


_evictions, _empty_steps, _dummy_batches = (
    RateLimitedCounter(mark) for mark in (events.KV_EVICTION, events.EMPTY_STEP, events.DUMMY_BATCH)
)


class _InFlightStep:
    """A step between `schedule` and `update_from_output`."""

    __slots__ = ("discarded", "members", "output", "step")

    def __init__(self, step: int, output: Any, members: list[str]) -> None:
        self.step, self.output, self.members, self.discarded = step, output, members, 0


class SchedulerSteps:
    """Records the steps of one scheduler. `block_tokens`: tokens per KV block, 0 = unknown."""

    def __init__(self, writer: BatchWriter, block_tokens: int) -> None:
        self.writer, self._pid = writer, os.getpid()
        self._blocks = KvBlockSizeRecorder(ENGINE, writer.number, block_tokens)
        self._blocks.record_block_size()
        self.waiting_reporter = scheduler_waits.WaitingReporter()
        self.drafts: dict[str, tuple[int, int]] = {}
        self.removed: list[str] = []
        self.in_flight: deque[_InFlightStep] = deque(maxlen=64)

    def record_scheduled(self, scheduler: Any, output: Any) -> None:
        """Records that a batch was composed; an empty batch is only counted."""
        tokens, at, waiting = (
            output.num_scheduled_tokens,
            _clock.now(),
            scheduler_waits.count_waiting(scheduler),
        )
        self.waiting_reporter.on_scheduled(scheduler, at, waiting)
        if not tokens:
            _empty_steps.add()
            _empty_steps.flush_if_due(at)
            return
        if _evictions.count:
            _evictions.flush_if_due(at)
        for new_request in output.scheduled_new_reqs:
            _record_admitted(scheduler, new_request, at)
        members = list(tokens)
        column = (
            b""
            if output.total_num_scheduled_tokens == len(members)
            else array("I", tokens.values()).tobytes()
        )
        left, self.removed = self.removed, []
        if left:
            self._blocks.record_block_size()
        step = self.writer.write_scheduled(members, left, column, *_read_load(scheduler), waiting)
        output.otel_infer_step = self._pid, step  # read by the hooks in the workers
        self.in_flight.append(_InFlightStep(step, output, members))

    def pop_step(self, output: Any) -> _InFlightStep | None:
        """Removes and returns the step in flight with this output; None if its start was not recorded."""
        for flight in self.in_flight:
            if flight.output is output:
                self.in_flight.remove(flight)
                return flight
        return None

    def count_drafts(self, flight: _InFlightStep, scheduler: Any, sampled: Any) -> None:
        """Adds the drafted and accepted tokens of this step per request (speculative decoding).

        Skips requests that finished or were preempted meanwhile.
        """
        output, sampled_each = flight.output, getattr(scheduler, "num_sampled_tokens_per_step", 1)
        invalid = getattr(output, "num_invalid_spec_tokens", None) or {}
        # A finished request stays in `scheduler.requests` only where a connector keeps its blocks.
        has_connector = any(
            getattr(scheduler, name, None) is not None for name in ("connector", "ec_connector")
        )
        sampled_ids = sampled.sampled_token_ids
        for request_id, draft in output.scheduled_spec_decode_tokens.items():
            request, index = scheduler.requests.get(request_id), sampled.req_id_to_index.get(request_id, -1)
            if (
                request is None
                or not 0 <= index < len(sampled_ids)
                or (has_connector and request.is_finished())
            ):
                continue
            if getattr(request, "num_stale_output_tokens", 0) and request.drop_stale_output:
                continue  # it was preempted meanwhile
            tokens = len(sampled_ids[index])
            if tokens:
                before = self.drafts.get(request_id, (0, 0))
                valid = len(draft) - invalid.get(request_id, 0)
                self.drafts[request_id] = before[0] + valid, before[1] + tokens - sampled_each

    def record_done(self, flight: _InFlightStep, at: int, outputs: list[Any]) -> None:
        """Records that a step is done at `at`. `outputs`: the engine core's outputs, one per request."""
        delivered = list(map(_get_request_id, outputs))
        counts = list(map(len, map(_get_new_tokens, outputs)))
        if delivered == flight.members and counts.count(1) == len(counts):
            self.writer.write_done(flight.step, at=at)
            return
        by_id = dict(zip(delivered, counts))
        column = array("I", map(by_id.get, flight.members, repeat(0))).tobytes()
        self.writer.write_done(flight.step, column, len(flight.members), flight.discarded, at=at)

    def on_idle(self, scheduler: Any) -> None:
        """Clears the batch and records pending counts if nothing runs any more.

        The next batch may be far away; it is recorded as a keyframe.
        """
        if not scheduler.running and not self.in_flight:
            self.removed = []
            self.writer.clear_batch()
            self._blocks.record_block_size()
            at = _clock.now()
            _evictions.flush(at)
            self.waiting_reporter.on_idle(scheduler, at)

    def remove_request(self, request_id: str) -> None:
        """Removes a request from the batch; tokens still in flight for it count as discarded."""
        self.removed.append(request_id)
        for flight in self.in_flight:
            flight.discarded += request_id in flight.output.num_scheduled_tokens


def _read_load(scheduler: Any) -> tuple[int, int, int]:
    """Returns the KV blocks in use, all KV blocks, and the number of running requests."""
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1  # vLLM's null block holds nothing
    return total - pool.get_num_free_blocks(), total, len(scheduler.running)


def _tokens_per_block(scheduler: Any) -> int:
    """Returns the tokens per KV block; 0 = unknown.

    Where layers differ in what they cache, a block belongs to a group of layers. Then the result is the
    average at the longest context (from vLLM 0.24 on).
    """
    total = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    whole = getattr(getattr(scheduler, "cache_config", None), "kv_cache_size_tokens", None)
    if len(groups) > 1:
        return round(whole / total) if whole and total else 0
    return int(getattr(scheduler, "block_size", 0))


def _record_admitted(scheduler: Any, new_request: Any, at: int) -> None:
    """Records the waits of a newly scheduled request, and how much of its prompt was cached.

    Blocks from a KV connector count as cached. For a streamed prompt this covers its first piece alone.
    """
    request = scheduler.requests[new_request.req_id]
    fragment = getattr(request, "otel_infer", None)
    if fragment is None or request.num_preemptions or getattr(request, "otel_infer_admitted", False):
        return
    request.otel_infer_admitted = True
    scheduler_waits.record_waits(request, fragment, at)
    if scheduler.kv_cache_manager.enable_caching and not request.skip_reading_prefix_cache:
        fragment.record_event(
            events.PrefixRead(at, request.num_prompt_tokens, new_request.num_computed_tokens)
        )


def get_scheduler_steps(scheduler: Any) -> SchedulerSteps | None:
    """Returns the step recorder of this scheduler, created if missing; None while nothing is recorded."""
    steps: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if steps is None or not steps.writer.alive:
        writer = recorder.acquire_batch_writer(ENGINE)
        if writer is None:
            return None
        steps = scheduler.otel_infer_batches = SchedulerSteps(writer, _tokens_per_block(scheduler))
    return steps


def remove_from_batch(scheduler: Any, request_id: str, is_over: bool) -> SchedulerSteps | None:
    """Removes a request from the batch and returns the scheduler's step recorder, or None.

    `is_over`: the request was freed. Otherwise it was preempted and will be scheduled again.
    """
    steps: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if steps is not None:
        steps.remove_request(request_id)
        if is_over:
            steps.writer.handles.pop(request_id, None)
        steps.on_idle(scheduler)
    return steps


@instrumentor.patch_hot_path(f"{SCHEDULER}.schedule", part=STEPS)
def wrap_schedule(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if hook.alive and recorder.active:
            try:
                steps = get_scheduler_steps(self)
                if steps is not None:
                    steps.record_scheduled(self, output)
            except Exception as exc:
                hook.mark_failed(exc)
        return output

    return schedule


@instrumentor.patch_hot_path(
    f"{SCHEDULER}.update_from_output", reads=("scheduler_output", "model_runner_output"), part=STEPS
)
def wrap_update_from_output(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        at, flight = _clock.now(), None
        steps: SchedulerSteps | None = getattr(self, "otel_infer_batches", None)
        if steps is not None and hook.alive:
            try:
                flight = steps.pop_step(scheduler_output)
                if flight is not None and scheduler_output.scheduled_spec_decode_tokens:
                    steps.count_drafts(flight, self, model_runner_output)
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        if flight is not None and steps is not None and hook.alive:
            try:
                steps.record_done(flight, at, list(chain.from_iterable(map(_get_outputs, result.values()))))
                steps.on_idle(self)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return update_from_output


@instrumentor.patch_hot_path(f"{BLOCK_POOL}._maybe_evict_cached_block", part=EVICTIONS)
def evict_cached_block(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Counts evicted blocks; a later step records the count, because vLLM calls this for every block."""

    def evict_cached_block(*args: Any, **kwargs: Any) -> Any:
        evicted = original(*args, **kwargs)
        if evicted and hook.alive:
            _evictions.add()
        return evicted

    return evict_cached_block


@instrumentor.patch_hot_path(f"{ENGINE_CORE}.execute_dummy_batch", part=DUMMY_BATCHES)
def wrap_execute_dummy_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.alive:
            try:
                _dummy_batches.add()
                _dummy_batches.flush_if_due(_clock.now())
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return execute_dummy_batch
