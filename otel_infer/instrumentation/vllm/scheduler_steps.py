"""Records the steps of one scheduler in any case; the hooks of `scheduler` record only the usual one.

In a usual step no request joined or left the batch, and every member runs one token. vLLM reports this itself.
A request joins `Scheduler.running` at its end, in `schedule` alone. It leaves without a change of order. So
the members are those of the step before under three conditions: `scheduled_new_reqs` and `resumed_req_ids`
are empty, all running requests were scheduled, then and now, and their number is the same. Members that
joined are the last keys of `num_scheduled_tokens`.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import KvBlockSizeRecorder
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import scheduler_waits
from otel_infer.instrumentation.vllm._instrumentor import ENGINE, REPORT_INTERVAL_NS
from otel_infer.instrumentation.vllm.scheduler_waits import NOTHING_WAITS
from otel_infer.instrumentation.vllm.step_fields import Counter, RequestRemoval, Steps
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder

UNKNOWN_SIZE = -1
MIN_REPORTED = 32
"""Members of the smallest batch of which a change is derived from vLLM's report; fewer are compared sooner."""

_get_request_id = attrgetter("request_id")
_get_new_tokens = attrgetter("new_token_ids")
_get_outputs = attrgetter("outputs")


class RateLimitedCounter(Counter):
    """Counts a frequent occurrence, and records the count under `mark` at most once a second."""

    __slots__ = ("_mark", "_since")

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


evictions, empty_steps, dummy_batches = (
    RateLimitedCounter(mark) for mark in (events.KV_EVICTION, events.EMPTY_STEP, events.DUMMY_BATCH)
)


class _FreeBlocks:
    """The free blocks of a pool that does not count them in its `free_block_queue`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())


class SchedulerSteps(Steps):
    """Records the steps of one scheduler. `hook`: the hook that recorded its last batch.

    `size`: the requests in the last batch if they were all running requests, else `UNKNOWN_SIZE`. `waiting`:
    the requests that wait; it changes with `removed`, or with a batch or a request that is recorded. `scheduled`
    and `done`: the last step that was composed, and the last one whose results came. `removed`: the requests
    that left since the last batch. `removals`: those that left steps in flight; their results are discarded.
    `single_tokens`: whether a result is one token, not a draft, a canvas or an encoder's output.
    `ended_early`: whether a request failed, and so may have ended without a token.
    `block_tokens`: tokens per KV block, 0 = unknown. `report_due_at`: the instant from which a batch is passed to
    the reporter of waiting requests.
    """

    __slots__ = ("_blocks", "drafts", "waiting_reporter", "writer")

    def __init__(self, scheduler: Any, writer: BatchWriter, hook: Hook | None) -> None:
        self.writer, self.hook, self.pid = writer, hook, os.getpid()
        self.scheduler, self.ring = weakref.ref(scheduler), writer.ring
        self._blocks = KvBlockSizeRecorder(ENGINE, writer.number, _tokens_per_block(scheduler))
        self._blocks.record_if_due(_clock.now())
        self.waiting_reporter = scheduler_waits.WaitingReporter()
        self.drafts: dict[str, tuple[int, int]] = {}
        self.removed: list[str] = []
        self.removals: list[RequestRemoval] = []
        self.size, self.ended_early = UNKNOWN_SIZE, False
        self.scheduled = self.done = 0
        self.single_tokens = (
            getattr(scheduler, "num_spec_tokens", 1) == 0
            and getattr(scheduler, "num_sampled_tokens_per_step", 1) == 1
            and not getattr(scheduler, "is_mm_encoder_only", False)
        )
        self.waiting, self.report_due_at = 0, NOTHING_WAITS
        self._bind(scheduler)

    def _bind(self, scheduler: Any) -> None:
        """Binds what each step reads of the KV cache."""
        pool = scheduler.kv_cache_manager.block_pool
        self.total_blocks = pool.num_gpu_blocks - 1  # vLLM's null block holds nothing
        queue: Any = getattr(pool, "free_block_queue", None)
        is_count = getattr(queue, "num_free_blocks", None) == pool.get_num_free_blocks()
        self.free_blocks = queue if is_count else _FreeBlocks(pool)

    def record_usual(self, scheduler: Any, output: Any) -> bool:
        """Records a batch with the members of the last one, of one token each; returns False for any other."""
        size, at = len(output.num_scheduled_tokens), _clock.now()
        if (
            size != self.size
            or size != len(scheduler.running)
            or size != output.total_num_scheduled_tokens
            or output.scheduled_new_reqs
            or output.scheduled_cached_reqs.resumed_req_ids
            or self.removed
        ):
            return False
        if at >= self.report_due_at:
            self._report_waiting(scheduler, at)
        used = self.total_blocks - self.free_blocks.num_free_blocks
        step = self.writer.write_unchanged(size, used, self.total_blocks, size, self.waiting, at)
        if not step:
            return False
        self.scheduled, output.otel_infer_step = step, (self.pid, step)  # read by the hooks in the workers
        return True

    def update_waiting(self, scheduler: Any) -> None:
        """Counts the waiting requests again."""
        self.waiting = waiting = scheduler_waits.count_waiting(scheduler)
        self.report_due_at = NOTHING_WAITS
        if waiting or self.waiting_reporter.reasons:
            self.report_due_at = self.waiting_reporter.find_due_at(scheduler, waiting)

    def _report_waiting(self, scheduler: Any, at: int) -> None:
        self.waiting_reporter.on_scheduled(scheduler, at, self.waiting)
        self.report_due_at = self.waiting_reporter.find_due_at(scheduler, self.waiting)

    def record_scheduled(self, scheduler: Any, output: Any) -> None:
        """Records that a batch was composed; an empty batch is only counted."""
        tokens, at = output.num_scheduled_tokens, _clock.now()
        self.update_waiting(scheduler)
        if at >= self.report_due_at:
            self._report_waiting(scheduler, at)
        if not tokens:
            empty_steps.add()
            empty_steps.flush_if_due(at)
            return
        if evictions.count:
            evictions.flush_if_due(at)
        for new_request in output.scheduled_new_reqs:
            _record_admitted(scheduler, new_request, at)
        left, self.removed = self.removed, []
        if left and at >= self._blocks.due_at:
            self._blocks.record_if_due(at)
        running = len(scheduler.running)
        load = self.total_blocks - self.free_blocks.num_free_blocks, self.total_blocks, running, self.waiting
        step = self._write_reported(output, left, *load)
        if not step:
            self._bind(scheduler)
            step = self._write_whole(output, left, *load)
        self.size = len(tokens) if len(tokens) == running else UNKNOWN_SIZE
        output.otel_infer_step = self.pid, step  # read by the hooks in the workers
        self.scheduled = step

    def _write_reported(self, output: Any, left: Sequence[str], *load: int) -> int:
        """Writes a batch with the members that vLLM reports as new; returns its step.

        Returns 0 if the report is not enough to know the batch, or the tokens of its members.
        """
        tokens = output.num_scheduled_tokens
        size = len(tokens)
        if size < MIN_REPORTED:
            return 0
        joining = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        if self.size == UNKNOWN_SIZE or size != load[2] or not (joining or left):
            return 0
        joined = list(islice(reversed(tokens), joining))[::-1]
        several = [(member, tokens[member]) for member in joined if tokens[member] != 1]
        if sum(count - 1 for _, count in several) != output.total_num_scheduled_tokens - size:
            return 0
        return self.writer.write_changed(size, left, joined, several, *load)

    def _write_whole(
        self, output: Any, left: Sequence[str], kv_used: int, kv_total: int, running: int, waiting: int
    ) -> int:
        """Writes a batch of which every member is compared; returns its step."""
        tokens = output.num_scheduled_tokens
        single = output.total_num_scheduled_tokens == len(tokens)
        column = b"" if single else array("I", tokens.values()).tobytes()
        return self.writer.write_scheduled(list(tokens), left, column, kv_used, kv_total, running, waiting)

    def count_drafts(self, output: Any, scheduler: Any, sampled: Any) -> None:
        """Adds the drafted and accepted tokens of this step per request (speculative decoding).

        Skips requests that finished or were preempted meanwhile.
        """
        sampled_each = getattr(scheduler, "num_sampled_tokens_per_step", 1)
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

    def record_done(self, output: Any, at: int, results: Iterable[Any]) -> None:
        """Records that the step of this output is done at `at`. `results`: the engine core's outputs by client."""
        step, members = output.otel_infer_step[1], list(output.num_scheduled_tokens)
        left = {one.request_id for one in self.removals if one.done < step <= one.scheduled}
        discarded = sum(member in left for member in members) if left else 0
        self.removals = [removal for removal in self.removals if removal.scheduled > step]
        self.ended_early = False
        outputs = list(chain.from_iterable(map(_get_outputs, results)))
        delivered = list(map(_get_request_id, outputs))
        counts = list(map(len, map(_get_new_tokens, outputs)))
        if delivered == members and counts.count(1) == len(counts):
            self.writer.write_single_tokens(step, at)
            return
        by_id = dict(zip(delivered, counts))
        column = array("I", map(by_id.get, members, repeat(0))).tobytes()
        self.writer.write_done(step, column, len(members), discarded, at=at)

    def on_idle(self, scheduler: Any) -> None:
        """Clears the batch and records pending counts if nothing runs any more.

        The next batch may be far away; it is recorded as a keyframe.
        """
        if not scheduler.running and self.done == self.scheduled:
            self.removed, self.removals, self.size = [], [], UNKNOWN_SIZE
            self.writer.clear_batch()
            at = _clock.now()
            self._blocks.record_if_due(at)
            evictions.flush(at)
            self.waiting_reporter.on_idle(scheduler, at)

    def remove_request(self, request_id: str) -> None:
        """Removes a request from the batch; tokens still in flight for it count as discarded."""
        self.removed.append(request_id)
        if self.done < self.scheduled:
            self.removals.append(RequestRemoval(request_id, self.done, self.scheduled))


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


def get_scheduler_steps(scheduler: Any, hook: Hook | None = None) -> SchedulerSteps | None:
    """Returns the step recorder of this scheduler, created if missing; None while nothing is recorded.

    `hook` records its next batch. Where another hook, or none, has seen the last one, it is recorded whole.
    """
    steps: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if steps is None or not steps.writer.alive:
        writer = recorder.acquire_batch_writer(ENGINE)
        if writer is None:
            return None
        steps = scheduler.otel_infer_batches = SchedulerSteps(scheduler, writer, hook)
    if hook is not None and steps.hook is not hook:
        steps.hook, steps.size = hook, UNKNOWN_SIZE
    return steps


def forget_batch(scheduler: Any) -> None:
    """Makes the next batch be recorded whole, because one passes unrecorded."""
    steps: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if steps is not None:
        steps.size = UNKNOWN_SIZE


def update_waiting(scheduler: Any) -> None:
    """Counts the waiting requests again, because one was added."""
    steps: SchedulerSteps | None = getattr(scheduler, "otel_infer_batches", None)
    if steps is not None:
        steps.update_waiting(scheduler)


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
