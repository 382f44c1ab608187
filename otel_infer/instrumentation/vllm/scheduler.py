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
from otel_infer.instrumentation.hooks.engines import Blocks
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_waits
from otel_infer.instrumentation.vllm._integration import (
    DUMMIES,
    ENGINE,
    EVICTIONS,
    SCHEDULER,
    STEPS,
    TOLD_EVERY_NS,
    integration,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import StepLog
from otel_infer.ringbuffer.recorder import recorder

CORE = "vllm.v1.engine.core:EngineCore"
BLOCKS = "vllm.v1.core.block_pool:BlockPool"

_id_of = attrgetter("request_id")
_new_tokens_of = attrgetter("new_token_ids")
_outputs_of = attrgetter("outputs")


class Tally:
    """Something that happens often: it is said how often at most once a second."""

    __slots__ = ("_mark", "_since", "count")

    def __init__(self, mark: str) -> None:
        self._mark, self._since, self.count = mark, 0, 0

    def add(self) -> None:
        """Once more."""
        self.count += 1

    def look(self, at: int) -> None:
        """States it, if the first of what was counted has been seen for long enough."""
        self._since = self._since or at
        if at - self._since >= TOLD_EVERY_NS:
            self.tell(at)

    def tell(self, at: int) -> None:
        """States what was not stated yet."""
        if self.count:
            recorder.marked(self._mark, self._since or at, at, self.count)
        self._since = self.count = 0


_evicted, _empty, _dummies = (
    Tally(mark) for mark in (events.KV_EVICTION, events.EMPTY_STEP, events.DUMMY_BATCH)
)


class _Flight:
    """A step between schedule and update."""

    __slots__ = ("gone", "members", "output", "step")

    def __init__(self, step: int, output: Any, members: list[str]) -> None:
        self.step, self.output, self.members, self.gone = step, output, members, 0


class Batches:
    """The steps of one scheduler."""

    def __init__(self, log: StepLog, block_tokens: int) -> None:
        self.log, self._pid = log, os.getpid()
        self._blocks = Blocks(ENGINE, log.number, block_tokens)
        self._blocks.say()
        self.waits = scheduler_waits.Waits()
        self.drafts: dict[str, tuple[int, int]] = {}
        self.left: list[str] = []
        self.flights: deque[_Flight] = deque(maxlen=64)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """A batch was composed; one of nothing is none."""
        tokens, at, waiting = output.num_scheduled_tokens, _clock.now(), scheduler_waits.waiting(scheduler)
        self.waits.look(scheduler, at, waiting)
        if not tokens:
            _empty.add()
            _empty.look(at)
            return
        if _evicted.count:
            _evicted.look(at)
        for new in output.scheduled_new_reqs:
            _admitted(scheduler, new, at)
        members = list(tokens)
        column = (
            b""
            if output.total_num_scheduled_tokens == len(members)
            else array("I", tokens.values()).tobytes()
        )
        left, self.left = self.left, []
        if left:
            self._blocks.say()
        step = self.log.scheduled(members, left, column, *_load(scheduler), waiting)
        output.otel_infer_step = self._pid, step  # for the workers
        self.flights.append(_Flight(step, output, members))

    def landed(self, output: Any) -> _Flight | None:
        """The step with this output is over; None for one that nobody saw scheduled."""
        for flight in self.flights:
            if flight.output is output:
                self.flights.remove(flight)
                return flight
        return None

    def drafted(self, flight: _Flight, scheduler: Any, sampled: Any) -> None:
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

    def done(self, flight: _Flight, at: int, outputs: list[Any]) -> None:
        """`outputs`: what is about to be sent, with the tokens of each request."""
        delivered = list(map(_id_of, outputs))
        counts = list(map(len, map(_new_tokens_of, outputs)))
        if delivered == flight.members and counts.count(1) == len(counts):
            self.log.done(flight.step, at=at)
            return
        by_id = dict(zip(delivered, counts))
        column = array("I", map(by_id.get, flight.members, repeat(0))).tobytes()
        self.log.done(flight.step, column, len(flight.members), flight.gone, at=at)

    def rest(self, scheduler: Any) -> None:
        """If nothing runs any more: it may be long until the next batch, which is told whole."""
        if not scheduler.running and not self.flights:
            self.left = []
            self.log.idle()
            self._blocks.say()
            at = _clock.now()
            _evicted.tell(at)
            self.waits.idle(scheduler, at)

    def leave(self, request_id: str) -> None:
        """A request is no longer in the batch; what is in flight for it will be thrown away."""
        self.left.append(request_id)
        for flight in self.flights:
            flight.gone += request_id in flight.output.num_scheduled_tokens


def _load(scheduler: Any) -> tuple[int, int, int]:
    """KV blocks used and in all, requests running."""
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1  # one is nobody's
    return total - pool.get_num_free_blocks(), total, len(scheduler.running)


def _block_tokens(scheduler: Any) -> int:
    """Where layers differ in what they keep, blocks are of groups of them: on average, at the longest context (from 0.24 on)."""
    total = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", ())
    whole = getattr(getattr(scheduler, "cache_config", None), "kv_cache_size_tokens", None)
    if len(groups) > 1:
        return round(whole / total) if whole and total else 0
    return int(getattr(scheduler, "block_size", 0))


def _admitted(scheduler: Any, new: Any, at: int) -> None:
    """What it had waited for, and what of its prompt was in the cache, blocks from elsewhere (a KV connector) included. Of a prompt
    that is streamed that is asked for its first piece alone."""
    request = scheduler.requests[new.req_id]
    part = getattr(request, "otel_infer", None)
    if part is None or request.num_preemptions or getattr(request, "otel_infer_admitted", False):
        return
    request.otel_infer_admitted = True
    scheduler_waits.over(request, part, at)
    if scheduler.kv_cache_manager.enable_caching and not request.skip_reading_prefix_cache:
        part.state(events.PrefixRead(at, request.num_prompt_tokens, new.num_computed_tokens))


def batches_of(scheduler: Any) -> Batches | None:
    """The steps of this scheduler; None where nobody records."""
    found: Batches | None = getattr(scheduler, "otel_infer_batches", None)
    if found is None or not found.log.alive:
        log = recorder.step_log(ENGINE)
        if log is None:
            return None
        found = scheduler.otel_infer_batches = Batches(log, _block_tokens(scheduler))
    return found


def left_batch(scheduler: Any, request_id: str, is_over: bool) -> Batches | None:
    """A request was freed, or preempted and comes back; the batches that it was in."""
    batches: Batches | None = getattr(scheduler, "otel_infer_batches", None)
    if batches is not None:
        batches.leave(request_id)
        if is_over:
            batches.log.handles.pop(request_id, None)
        batches.rest(scheduler)
    return batches


@integration.step_hook(f"{SCHEDULER}.schedule", part=STEPS)
def schedule(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if hook.alive and recorder.active:
            try:
                batches = batches_of(self)
                if batches is not None:
                    batches.scheduled(self, output)
            except Exception as exc:
                hook.fail(exc)
        return output

    return schedule


@integration.step_hook(
    f"{SCHEDULER}.update_from_output", reads=("scheduler_output", "model_runner_output"), part=STEPS
)
def update_from_output(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        at, flight = _clock.now(), None
        batches: Batches | None = getattr(self, "otel_infer_batches", None)
        if batches is not None and hook.alive:
            try:
                flight = batches.landed(scheduler_output)
                if flight is not None and scheduler_output.scheduled_spec_decode_tokens:
                    batches.drafted(flight, self, model_runner_output)
            except Exception as exc:
                hook.fail(exc)
        result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        if flight is not None and batches is not None and hook.alive:
            try:
                batches.done(flight, at, list(chain.from_iterable(map(_outputs_of, result.values()))))
                batches.rest(self)
            except Exception as exc:
                hook.fail(exc)
        return result

    return update


@integration.step_hook(f"{BLOCKS}._maybe_evict_cached_block", part=EVICTIONS)
def evict(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For every block that a request gets: told with a step."""

    def evict(*args: Any, **kwargs: Any) -> Any:
        evicted = original(*args, **kwargs)
        if evicted:
            _evicted.add()
        return evicted

    return evict


@integration.step_hook(f"{CORE}.execute_dummy_batch", part=DUMMIES)
def dummy_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def execute(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.alive:
            _dummies.add()
            _dummies.look(_clock.now())
        return result

    return execute
