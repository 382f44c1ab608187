"""The engine core, step by step: two facts per step, on the thread that schedules.

    schedule ─▶ (workers) ─▶ update_from_output
    scheduled                done

Two steps may be in flight (asynchronous scheduling, pipelines), so a step is known again at its end by its
`SchedulerOutput`. Who is in it are the keys of one of its dictionaries, in order: the running ones, then who was resumed or
is new. What was computed for a request that ended meanwhile is discarded. Steps of nothing (polls of a KV connector) and
dummy batches (a rank that waits for its peers) are no steps: they are counted.
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
    """Something that happens often: it is said how often at most once a second."""

    __slots__ = ("_mark", "_since", "count")

    def __init__(self, mark: str) -> None:
        self._mark, self._since, self.count = mark, 0, 0

    def add(self) -> None:
        """Once more."""
        self.count += 1

    def flush_if_due(self, at: int) -> None:
        """States it, if the first of what was counted has been seen for long enough."""
        self._since = self._since or at
        if at - self._since >= REPORT_INTERVAL_NS:
            self.flush(at)

    def flush(self, at: int) -> None:
        """States what was not stated yet."""
        if self.count:
            recorder.count(self._mark, self._since or at, at, self.count)
        self._since = self.count = 0


_evictions, _empty_steps, _dummy_batches = (
    RateLimitedCounter(mark) for mark in (events.KV_EVICTION, events.EMPTY_STEP, events.DUMMY_BATCH)
)


class _InFlightStep:
    """A step between schedule and update."""

    __slots__ = ("discarded", "members", "output", "step")

    def __init__(self, step: int, output: Any, members: list[str]) -> None:
        self.step, self.output, self.members, self.discarded = step, output, members, 0


class SchedulerSteps:
    """The steps of one scheduler."""

    def __init__(self, log: BatchWriter, block_tokens: int) -> None:
        self.writer, self._pid = log, os.getpid()
        self._blocks = KvBlockSizeRecorder(ENGINE, log.number, block_tokens)
        self._blocks.record_block_size()
        self.waiting_reporter = scheduler_waits.WaitingReporter()
        self.drafts: dict[str, tuple[int, int]] = {}
        self.removed: list[str] = []
        self.in_flight: deque[_InFlightStep] = deque(maxlen=64)

    def record_scheduled(self, scheduler: Any, output: Any) -> None:
        """A batch was composed; one of nothing is none."""
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
        for new in output.scheduled_new_reqs:
            _record_admitted(scheduler, new, at)
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
        output.otel_infer_step = self._pid, step  # for the workers
        self.in_flight.append(_InFlightStep(step, output, members))

    def pop_step(self, output: Any) -> _InFlightStep | None:
        """The step with this output is over; None for one that nobody saw scheduled."""
        for flight in self.in_flight:
            if flight.output is output:
                self.in_flight.remove(flight)
                return flight
        return None

    def count_drafts(self, flight: _InFlightStep, scheduler: Any, sampled: Any) -> None:
        """What was guessed ahead in this step, and how much of it the model agreed with; who is gone meanwhile is not counted."""
        output, sampled_each = flight.output, getattr(scheduler, "num_sampled_tokens_per_step", 1)
        invalid = getattr(output, "num_invalid_spec_tokens", None) or {}
        # Only a connector keeps the blocks of one that is over.
        keeps = any(getattr(scheduler, name, None) is not None for name in ("connector", "ec_connector"))
        sampled_ids = sampled.sampled_token_ids
        for who, drafted in output.scheduled_spec_decode_tokens.items():
            request, index = scheduler.requests.get(who), sampled.req_id_to_index.get(who, -1)
            if request is None or not 0 <= index < len(sampled_ids) or (keeps and request.is_finished()):
                continue
            if getattr(request, "num_stale_output_tokens", 0) and request.drop_stale_output:
                continue  # it was put back meanwhile
            tokens = len(sampled_ids[index])
            if tokens:
                before = self.drafts.get(who, (0, 0))
                valid = len(drafted) - invalid.get(who, 0)
                self.drafts[who] = before[0] + valid, before[1] + tokens - sampled_each

    def record_done(self, flight: _InFlightStep, at: int, outputs: list[Any]) -> None:
        """`outputs`: what is about to be sent, with the tokens of each request."""
        delivered = list(map(_get_request_id, outputs))
        counts = list(map(len, map(_get_new_tokens, outputs)))
        if delivered == flight.members and counts.count(1) == len(counts):
            self.writer.write_done(flight.step, at=at)
            return
        by_id = dict(zip(delivered, counts))
        column = array("I", map(by_id.get, flight.members, repeat(0))).tobytes()
        self.writer.write_done(flight.step, column, len(flight.members), flight.discarded, at=at)

    def on_idle(self, scheduler: Any) -> None:
        """If nothing runs any more: it may be long until the next batch, which is told whole."""
        if not scheduler.running and not self.in_flight:
            self.removed = []
            self.writer.clear_batch()
            self._blocks.record_block_size()
            at = _clock.now()
            _evictions.flush(at)
            self.waiting_reporter.on_idle(scheduler, at)

    def remove_request(self, request_id: str) -> None:
        """A request is no longer in the batch; what is in flight for it will be thrown away."""
        self.removed.append(request_id)
        for flight in self.in_flight:
            flight.discarded += request_id in flight.output.num_scheduled_tokens


def _read_load(scheduler: Any) -> tuple[int, int, int]:
    """KV blocks used and in all, requests running."""
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1  # one is nobody's
    return total - pool.get_num_free_blocks(), total, len(scheduler.running)


def _tokens_per_block(scheduler: Any) -> int:
    """Where layers differ in what they keep, blocks are of groups of them: on average, at the longest context (from 0.24 on)."""
    total = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    whole = getattr(getattr(scheduler, "cache_config", None), "kv_cache_size_tokens", None)
    if len(groups) > 1:
        return round(whole / total) if whole and total else 0
    return int(getattr(scheduler, "block_size", 0))


def _record_admitted(scheduler: Any, new: Any, at: int) -> None:
    """What it had waited for, and what of its prompt was in the cache, blocks from elsewhere (a KV connector) included. Of a prompt
    that is streamed that is asked for its first piece alone."""
    request = scheduler.requests[new.req_id]
    part = getattr(request, "otel_infer", None)
    if part is None or request.num_preemptions or getattr(request, "otel_infer_admitted", False):
        return
    request.otel_infer_admitted = True
    scheduler_waits.record_waits(request, part, at)
    if scheduler.kv_cache_manager.enable_caching and not request.skip_reading_prefix_cache:
        part.record_event(events.PrefixRead(at, request.num_prompt_tokens, new.num_computed_tokens))


def get_scheduler_steps(scheduler: Any) -> SchedulerSteps | None:
    """The steps of this scheduler; None where nobody records."""
    found: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if found is None or not found.writer.alive:
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            return None
        found = scheduler.otel_infer_batches = SchedulerSteps(log, _tokens_per_block(scheduler))
    return found


def remove_from_batch(scheduler: Any, request_id: str, is_over: bool) -> SchedulerSteps | None:
    """A request was freed, or preempted and comes back; the batches that it was in."""
    batches: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if batches is not None:
        batches.remove_request(request_id)
        if is_over:
            batches.writer.handles.pop(request_id, None)
        batches.on_idle(scheduler)
    return batches


@instrumentor.patch_hot_path(f"{SCHEDULER}.schedule", part=STEPS)
def wrap_schedule(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if hook.alive and recorder.active:
            try:
                batches = get_scheduler_steps(self)
                if batches is not None:
                    batches.record_scheduled(self, output)
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
        batches: SchedulerSteps | None = getattr(self, "otel_infer_batches", None)
        if batches is not None and hook.alive:
            try:
                flight = batches.pop_step(scheduler_output)
                if flight is not None and scheduler_output.scheduled_spec_decode_tokens:
                    batches.count_drafts(flight, self, model_runner_output)
            except Exception as exc:
                hook.mark_failed(exc)
        result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        if flight is not None and batches is not None and hook.alive:
            try:
                batches.record_done(flight, at, list(chain.from_iterable(map(_get_outputs, result.values()))))
                batches.on_idle(self)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return update_from_output


@instrumentor.patch_hot_path(f"{BLOCK_POOL}._maybe_evict_cached_block", part=EVICTIONS)
def evict_cached_block(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For every block that a request gets: told with a step."""

    def evict_cached_block(*args: Any, **kwargs: Any) -> Any:
        evicted = original(*args, **kwargs)
        if evicted:
            _evictions.add()
        return evicted

    return evict_cached_block


@instrumentor.patch_hot_path(f"{ENGINE_CORE}.execute_dummy_batch", part=DUMMY_BATCHES)
def wrap_execute_dummy_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.alive:
            _dummy_batches.add()
            _dummy_batches.flush_if_due(_clock.now())
        return result

    return execute_dummy_batch
