"""The engine core: what keeps a request from being scheduled, whatever room there is.

    grammar       of a structured output: asked for on the thread that reads the socket, compiled by a pool
    kv transfer   KV blocks come from elsewhere, while others' steps run

Both are stages inside of the queue. How many wait, and for what, is told once a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm._instrumentor import (
    GRAMMARS,
    REPORT_INTERVAL_NS,
    SCHEDULER,
    TRANSFERS,
    instrumentor,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

MANAGER = "vllm.v1.structured_output:StructuredOutputManager"
GRAMMAR, KV_TRANSFER = "grammar", "kv transfer"
WAITING_FOR_KV = "WAITING_FOR_REMOTE_KVS"
CAPACITY, OTHER = "capacity", "other"
REASONS = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    WAITING_FOR_KV: "kv_transfer",
    "WAITING_FOR_STREAMING_REQ": "input",
}
"""By the status of a request that the scheduler has set aside; another one waits there for a LoRA's slot, an encoder's cache, …"""


class WaitingReporter:
    """Who waits in one scheduler, told once a second while anybody does, and a last time when nobody does."""

    __slots__ = ("_reasons", "_reported_at")

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._reported_at = 0

    def on_scheduled(self, scheduler: Any, at: int, waiting: int) -> None:
        """A batch was composed, while so many wait."""
        aside = deferred_requests(scheduler)
        if aside and getattr(scheduler, "connector", None) is not None:
            for request in aside:
                if request.status.name == WAITING_FOR_KV and not hasattr(request, "otel_infer_kv"):
                    request.otel_infer_kv = at
        if (waiting or self._reasons) and at - self._reported_at >= REPORT_INTERVAL_NS:
            self.report_waiting(scheduler, at)

    def on_idle(self, scheduler: Any, at: int) -> None:
        """Nothing runs any more; it may be long until the next batch."""
        if self._reasons:
            self.report_waiting(scheduler, at)

    def report_waiting(self, scheduler: Any, at: int) -> None:
        """Tells it now."""
        counts = Counter(REASONS.get(request.status.name, OTHER) for request in deferred_requests(scheduler))
        counts[CAPACITY] = count_waiting(scheduler) - counts.total()
        for reason in sorted(self._reasons | counts.keys()):
            recorder.record_process(events.WaitingSeen(at, reason, max(counts[reason], 0)))
        self._reasons, self._reported_at = {reason for reason, requests in counts.items() if requests > 0}, at


def count_waiting(scheduler: Any) -> int:
    """Requests that it knows and has not scheduled; those it set aside are in queues of their own from 0.18 to 0.30, and those
    with KV blocks since 0.31."""
    skipped, holding = getattr(scheduler, "skipped_waiting", ()), getattr(scheduler, "kv_holding_waiting", ())
    return len(scheduler.waiting) + len(skipped) + len(holding)


def deferred_requests(scheduler: Any) -> Collection[Any]:
    """Those of them that it may not schedule yet; 0.17 does not tell."""
    aside: Collection[Any] | None = getattr(scheduler, "deferred_waiting", None)
    return getattr(scheduler, "skipped_waiting", ()) if aside is None else aside


def record_waits(request: Any, part: Any, at: int) -> None:
    """A request is scheduled for the first time, or is gone: what it had waited for."""
    began, ended = getattr(request, "otel_infer_grammar", (0, 0))
    if began:
        request.otel_infer_grammar = 0, 0
        seen = max(ended or at, part.began_at)  # nobody looks for it before the scheduler has the request
        part.record_event(events.StageEnded(seen, began, GRAMMAR, 0))
    _record_kv_transfer(request, part, at)


def _record_kv_transfer(request: Any, part: Any, at: int) -> None:
    began = getattr(request, "otel_infer_kv", 0)
    if began:
        del request.otel_infer_kv
        part.record_event(events.StageEnded(at, began, KV_TRANSFER, 0))


@instrumentor.patch_hot_path(f"{MANAGER}.grammar_init", reads=("request",), part=GRAMMARS)
def wrap_grammar_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For every request; the first one with a grammar waits here for the library that compiles it, and all behind it do."""

    def grammar_init(self: Any, request: Any) -> Any:
        if hook.alive:
            try:
                if request.structured_output_request is not None:
                    request.otel_infer_grammar = _clock.now(), 0
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, request)

    return grammar_init


@instrumentor.patch_hot_path(f"{MANAGER}._create_grammar", reads=("request",), part=GRAMMARS)
def wrap_create_grammar(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """On a thread of a pool, before the request may be scheduled."""

    def create_grammar(self: Any, request: Any) -> Any:
        try:
            return original(self, request)
        finally:
            asked = getattr(request, "otel_infer_grammar", None)
            if asked is not None:
                request.otel_infer_grammar = asked[0], _clock.now()

    return create_grammar


@instrumentor.patch_hot_path(f"{SCHEDULER}._update_waiting_for_remote_kv", reads=("request",), part=TRANSFERS)
def wrap_update_remote_kv(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Its blocks are here; 0.17 also asks whether they are, and is told no by `False`."""

    def update_waiting_for_remote_kv(self: Any, request: Any) -> Any:
        result = original(self, request)
        part = getattr(request, "otel_infer", None)
        if hook.alive and part is not None and result is not False:
            try:
                _record_kv_transfer(request, part, _clock.now())
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return update_waiting_for_remote_kv
