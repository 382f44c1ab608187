"""Records the steps of SGLang's scheduler, and the requests that it holds."""

from __future__ import annotations

import weakref
from array import array
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import KvBlockSizeRecorder
from otel_infer.instrumentation.sglang._instrumentor import ENGINE, STATE
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import propagation

_UNKNOWN = bytes(4)
ATTRIBUTE = "otel_infer_steps"
"""Attribute of a scheduler."""


class ScheduledRequest:
    """A request in the scheduler, with the fragment of the request that it joins. `cached`: its prefix is recorded."""

    __slots__ = ("_ended", "_release", "_req", "cached", "fragment")

    def __init__(self, req: Any, fragment: propagation.RequestFragment) -> None:
        self.fragment, self._req, self.cached, self._ended = fragment, weakref.ref(req), False, False
        # A request may be dropped on a path that no hook follows.
        self._release = weakref.finalize(req, propagation.release, fragment)
        self._release.atexit = False

    def retract(self) -> None:
        """Records that the request went back to the queue; its tokens are computed again."""
        self.fragment.record_event(events.RequestPreempted(_clock.now(), "recompute"))

    def record_prefix(self, cached: int) -> None:
        """Records, once, how many tokens of the prompt the radix cache held."""
        req = self._req()
        if not self.cached and req is not None:
            self.cached = True
            prompt = len(req.origin_input_ids)
            self.fragment.record_event(events.PrefixRead(_clock.now(), prompt, min(cached, prompt)))

    def finish(self, reason: str = "") -> None:
        """Records the end of the request, once."""
        req = self._req()
        if self._ended or req is None:
            return
        self._ended = True
        reason = reason or str(req.finished_reason.to_json()["type"] if req.finished_reason else "stop")
        self.fragment.record_event(events.EngineFinished(_clock.now(), reason, _count_output(req)))
        self._release()


DECODE, PREFILL, SPECULATIVE = range(3)
"""How many tokens a step delivers to a member: one, at most one, with the last chunk of its prompt, or several."""


def _count_output(req: Any) -> int:
    """Returns the tokens that a request has delivered: none of an embedding, or past its end."""
    count, finished = len(req.output_ids), getattr(req, "finished_len", None)
    return count if finished is None else min(count, int(finished))


class LaunchedStep(NamedTuple):
    """A step of which the results have not been processed."""

    step: int
    size: int
    kind: int


class DeliveredTokens(NamedTuple):
    """What a step will deliver. `counts`: the tokens of each member; empty = one of each. `lengths`: the tokens that each
    member has before, of a step that delivers several."""

    launched: LaunchedStep
    counts: bytes = b""
    discarded: int = 0
    lengths: tuple[int, ...] = ()


class SglangSteps:
    """Records the steps of one scheduler. `launched`: those without results, by their `forward_iter`.

    `mixed_until`: a request has left the batch; steps up to this one may have computed for it in vain. `has_ended`: a request
    has left since the batch was last known to hold others. `results_at`: when the first request of the step that is processed
    left, before its output was sent; 0 = none has.
    """

    __slots__ = (
        *("__weakref__", "_blocks", "_known_mode", "_known_kind", "_total"),
        *("has_ended", "launched", "mixed_until", "results_at", "writer"),
    )

    def __init__(self, scheduler: Any, writer: BatchWriter) -> None:
        self.writer = writer
        writer.pack_handles = _pack_handles
        self.launched: dict[int, LaunchedStep] = {}
        self.mixed_until, self.results_at, self.has_ended = 0, 0, False
        self._known_mode: Any = None
        self._known_kind = DECODE
        self._total = int(scheduler.max_total_num_tokens)
        self._blocks = KvBlockSizeRecorder(ENGINE, writer.number, 1)

    @staticmethod
    def find(scheduler: Any) -> SglangSteps | None:
        """Returns the steps of this scheduler, made at the first call; None while nothing records."""
        steps: SglangSteps | None = scheduler.__dict__.get(ATTRIBUTE)
        if steps is not None and steps.writer.alive:
            return steps
        writer = recorder.acquire_batch_writer(ENGINE)
        if writer is None:
            return None
        steps = SglangSteps(scheduler, writer)
        setattr(scheduler, ATTRIBUTE, steps)
        _last_steps.set(steps)
        return steps

    @staticmethod
    def record_scheduled(scheduler: Any, batch: Any) -> None:
        """Records a batch that this scheduler is about to run. A batch without requests is none."""
        steps, reqs = SglangSteps.find(scheduler), batch.reqs
        if steps is None or not reqs:
            return
        kind, column = steps._find_kind(batch), b""
        if kind == PREFILL:
            lengths = list(batch.extend_lens or ())
            if len(lengths) == len(reqs):
                column = array("I", lengths).tobytes()
            _record_prefixes(batch)
            steps._blocks.record_if_due(_clock.now())
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        load = max(steps._total - free, 0), steps._total, len(reqs), len(scheduler.waiting_queue)
        step = steps.writer.write_scheduled(list(reqs), (), column, *load)
        steps.launched[scheduler.forward_ct + 1] = LaunchedStep(step, len(reqs), kind)

    def _find_kind(self, batch: Any) -> int:
        """Returns how this batch delivers tokens. Modes are members of an enumeration, and few: the last one is kept."""
        if batch.forward_mode is not self._known_mode:
            self._known_mode = batch.forward_mode
            decode = DECODE if batch.spec_algorithm.is_none() else SPECULATIVE
            self._known_kind = PREFILL if batch.forward_mode.is_extend() else decode
        return self._known_kind

    @staticmethod
    def begin_processing(scheduler: Any, batch: Any) -> DeliveredTokens | None:
        """Returns what the step will deliver of which the results are processed now; None if it was not recorded."""
        steps = SglangSteps.find(scheduler)
        launched = steps.launched.pop(batch.forward_iter, None) if steps is not None else None
        if steps is None or launched is None:
            return None
        reqs, steps.results_at = batch.reqs, 0
        if launched.size != len(reqs):
            return DeliveredTokens(launched)
        if launched.kind != DECODE:
            return DeliveredTokens(launched, lengths=tuple(map(_count_output, reqs)))
        if batch.forward_iter > steps.mixed_until:
            return DeliveredTokens(launched)
        tokens = [int(not _has_left(req)) for req in reqs]
        return DeliveredTokens(launched, array("I", tokens).tobytes(), launched.size - sum(tokens))

    @staticmethod
    def record_done(scheduler: Any, delivered: DeliveredTokens, batch: Any) -> None:
        """Records that the results of a step are processed."""
        steps, (step, size, _) = SglangSteps.find(scheduler), delivered.launched
        if steps is None:
            return
        counts = delivered.counts
        if delivered.lengths:
            grown = [_count_output(req) - before for req, before in zip(batch.reqs, delivered.lengths)]
            counts = array("I", [max(count, 0) for count in grown]).tobytes()
        steps.writer.write_done(step, counts, size, delivered.discarded, at=steps.results_at)
        if steps.has_ended and not steps.launched and not scheduler.waiting_queue:
            steps.has_ended, running = False, scheduler.running_batch
            if running is None or all(map(_has_left, running.reqs)):
                steps.writer.clear_batch()

    @staticmethod
    def note_end() -> None:
        """Notes that a request has left the batch, of which steps may be in flight."""
        steps = _last_steps.get()
        if steps is not None:
            steps.has_ended, steps.mixed_until = True, max(steps.launched, default=0)
            steps.results_at = steps.results_at or _clock.now()


def _record_prefixes(batch: Any) -> None:
    for req, cached in zip(batch.reqs, batch.prefix_lens or ()):
        scheduled = req.time_stats.__dict__.get(STATE)
        if scheduled is not None and not req.output_ids:
            scheduled.record_prefix(cached)


class _LastSteps:
    """The steps of the scheduler of this process; it has one."""

    def __init__(self) -> None:
        self._steps: weakref.ref[SglangSteps] | None = None

    def set(self, steps: SglangSteps) -> None:
        self._steps = weakref.ref(steps)

    def get(self) -> SglangSteps | None:
        return self._steps() if self._steps is not None else None


_last_steps = _LastSteps()


def _has_left(req: Any) -> bool:
    return req.finished_reason is not None or bool(req.is_retracted)


def _pack_handles(members: Any) -> bytes:
    return b"".join([getattr(req, "otel_infer_packed", _UNKNOWN) for req in members])
