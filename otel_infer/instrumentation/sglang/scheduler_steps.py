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
        self.fragment.record_event(events.EngineFinished(_clock.now(), reason, len(req.output_ids)))
        steps = _last_steps.get()
        if steps is not None:
            steps.note_end()
        self._release()


class LaunchedStep(NamedTuple):
    """A step whose results have not been processed. `delivered`: the tokens of each member; empty = one of each."""

    step: int
    size: int
    delivered: bytes
    discarded: int
    lengths: tuple[int, ...]


class SglangSteps:
    """Records the steps of one scheduler. `launched`: those without results, by their `forward_iter`.

    `mixed_until`: a request has left the batch; steps up to this one may have computed for it in vain.
    """

    __slots__ = ("__weakref__", "_blocks", "_scheduler", "_total", "launched", "mixed_until", "writer")

    def __init__(self, scheduler: Any, writer: BatchWriter) -> None:
        self.writer, self._scheduler = writer, weakref.ref(scheduler)
        writer.pack_handles = _pack_handles
        self.launched: dict[int, tuple[int, int]] = {}
        self.mixed_until = 0
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

    def record_scheduled(self, batch: Any, number: int) -> None:
        """Records a batch that is about to run as SGLang's `number`th."""
        scheduler, reqs = self._scheduler(), batch.reqs
        if scheduler is None or not reqs or batch.forward_mode.is_idle():
            return
        column = b""
        if batch.forward_mode.is_extend():
            lengths = list(batch.extend_lens or ())
            if len(lengths) == len(reqs):
                column = array("I", lengths).tobytes()
            self._record_prefixes(batch)
            self._blocks.record_if_due(_clock.now())
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        load = max(self._total - free, 0), self._total, len(reqs), len(scheduler.waiting_queue)
        self.launched[number] = self.writer.write_scheduled(list(reqs), (), column, *load), len(reqs)

    def _record_prefixes(self, batch: Any) -> None:
        for req, cached in zip(batch.reqs, batch.prefix_lens or ()):
            scheduled = req.time_stats.__dict__.get(STATE)
            if scheduled is not None and not req.output_ids:
                scheduled.record_prefix(cached)

    def begin_processing(self, batch: Any) -> LaunchedStep | None:
        """Returns the step of a batch whose results are processed now, with what it will deliver."""
        number = batch.forward_iter
        step, size = self.launched.pop(number, (0, 0))
        reqs = batch.reqs
        if not step or size != len(reqs):
            return LaunchedStep(step, size, b"", 0, ()) if step else None
        if batch.forward_mode.is_extend():
            tokens = [int(req.inflight_middle_chunks <= 0 and not _has_left(req)) for req in reqs]
            return LaunchedStep(step, size, array("I", tokens).tobytes(), 0, ())
        if not batch.spec_algorithm.is_none():
            return LaunchedStep(step, size, b"", 0, tuple([len(req.output_ids) for req in reqs]))
        if number > self.mixed_until:
            return LaunchedStep(step, size, b"", 0, ())
        tokens = [int(not _has_left(req)) for req in reqs]
        return LaunchedStep(step, size, array("I", tokens).tobytes(), size - sum(tokens), ())

    def record_done(self, launched: LaunchedStep, batch: Any) -> None:
        """Records that the results of a step are processed."""
        column = launched.delivered
        if launched.lengths:
            grown = [len(req.output_ids) - before for req, before in zip(batch.reqs, launched.lengths)]
            column = array("I", [max(count, 0) for count in grown]).tobytes()
        self.writer.write_done(launched.step, column, launched.size, launched.discarded)
        scheduler = self._scheduler()
        if not self.launched and scheduler is not None and not scheduler.waiting_queue:
            running = scheduler.running_batch
            if running is None or all(map(_has_left, running.reqs)):
                self.writer.clear_batch()

    def note_end(self) -> None:
        """Notes that a request has left the batch, of which steps may be in flight."""
        self.mixed_until = max(self.launched, default=0)


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
