"""Hooks in the engine core that record why a request waits although the batch has room.

* `grammar`: a structured output's grammar, requested on the thread that reads the socket, compiled in a
  thread pool.
* `kv transfer`: KV blocks arrive through a KV connector, while steps of other requests run.

Both are stages inside the queue. The number of waiting requests per reason is recorded once a second.
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
GRAMMAR, KV_TRANSFER = events.GRAMMAR, events.KV_TRANSFER
WAITING_FOR_KV = "WAITING_FOR_REMOTE_KVS"
CAPACITY, OTHER = "capacity", "other"
REASONS = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    WAITING_FOR_KV: "kv_transfer",
    "WAITING_FOR_STREAMING_REQ": "input",
}
"""Wait reasons by the status of a deferred request.

Any other status is `OTHER`: a LoRA slot, the encoder cache, …
"""


NOTHING_WAITS = 1 << 62
"""The instant of a report (monotonic ns) that is not due."""


class WaitingReporter:
    """Records the waiting requests of one scheduler once a second, and once more when none waits.

    `reasons`: the reasons that were recorded last.
    """

    __slots__ = ("_reported_at", "reasons")

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self._reported_at = 0

    def on_scheduled(self, scheduler: Any, at: int, waiting: int) -> None:
        """Records the waiting requests if that is due, after a batch was composed; `waiting` is their number.

        It also marks each request that begins to wait for KV blocks.
        """
        deferred = get_deferred_requests(scheduler)
        if deferred and getattr(scheduler, "connector", None) is not None:
            for request in deferred:
                if request.status.name == WAITING_FOR_KV and not hasattr(request, "otel_infer_kv"):
                    request.otel_infer_kv = at
        if (waiting or self.reasons) and at - self._reported_at >= REPORT_INTERVAL_NS:
            self.report_waiting(scheduler, at)

    def find_due_at(self, scheduler: Any, waiting: int) -> int:
        """Returns from which instant on a batch is passed to `on_scheduled`: 0 = each, `NOTHING_WAITS` = none.

        With a KV connector a request may begin to wait for blocks at each batch.
        """
        if not (waiting or self.reasons):
            return NOTHING_WAITS
        return (
            0 if getattr(scheduler, "connector", None) is not None else self._reported_at + REPORT_INTERVAL_NS
        )

    def on_idle(self, scheduler: Any, at: int) -> None:
        """Records the waiting requests now, because the next batch may be far away."""
        if self.reasons:
            self.report_waiting(scheduler, at)

    def report_waiting(self, scheduler: Any, at: int) -> None:
        """Records the number of waiting requests per reason, reasons that have become 0 included."""
        counts = Counter(
            REASONS.get(request.status.name, OTHER) for request in get_deferred_requests(scheduler)
        )
        counts[CAPACITY] = count_waiting(scheduler) - counts.total()
        for reason in sorted(self.reasons | counts.keys()):
            recorder.record_process(events.WaitingSeen(at, reason, max(counts[reason], 0)))
        self.reasons, self._reported_at = {reason for reason, requests in counts.items() if requests > 0}, at


def count_waiting(scheduler: Any) -> int:
    """Returns the number of requests that the scheduler holds and has not scheduled.

    vLLM 0.18 to 0.30 keeps deferred requests in a separate queue. From 0.31 on, requests that hold KV blocks
    have one.
    """
    skipped, holding = getattr(scheduler, "skipped_waiting", ()), getattr(scheduler, "kv_holding_waiting", ())
    return len(scheduler.waiting) + len(skipped) + len(holding)


def get_deferred_requests(scheduler: Any) -> Collection[Any]:
    """Returns the waiting requests that cannot be scheduled yet; empty on 0.17, which lists none."""
    deferred: Collection[Any] | None = getattr(scheduler, "deferred_waiting", None)
    return getattr(scheduler, "skipped_waiting", ()) if deferred is None else deferred


def record_waits(request: Any, fragment: Any, at: int) -> None:
    """Records the waits of a request as stages, when it is first scheduled or freed at `at`."""
    started_at, ended = getattr(request, "otel_infer_grammar", (0, 0))
    if started_at:
        request.otel_infer_grammar = 0, 0
        # The scheduler checks for the grammar only after it has received the request.
        ended_at = max(ended or at, fragment.began_at)
        fragment.record_event(events.StageEnded(ended_at, started_at, GRAMMAR, 0))
    _record_kv_transfer(request, fragment, at)


def _record_kv_transfer(request: Any, fragment: Any, at: int) -> None:
    started_at = getattr(request, "otel_infer_kv", 0)
    if started_at:
        del request.otel_infer_kv
        fragment.record_event(events.StageEnded(at, started_at, KV_TRANSFER, 0))


@instrumentor.patch_hot_path(f"{MANAGER}.grammar_init", reads=("request",), part=GRAMMARS)
def wrap_grammar_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Marks when the grammar of a request was requested.

    vLLM calls it for every request. The first grammar waits here until vLLM has set up the compiling library,
    which delays all requests behind it on the socket.
    """

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
    """Marks when the grammar was compiled; runs on a thread of vLLM's pool, or inline where vLLM uses no
    pool.
    """

    def create_grammar(self: Any, request: Any) -> Any:
        try:
            return original(self, request)
        finally:
            if hook.alive:
                _mark_compiled(request, hook)

    return create_grammar


def _mark_compiled(request: Any, hook: Hook) -> None:
    try:
        compilation = getattr(request, "otel_infer_grammar", None)
        if compilation is not None:
            request.otel_infer_grammar = compilation[0], _clock.now()
    except Exception as exc:
        hook.mark_failed(exc)


@instrumentor.patch_hot_path(f"{SCHEDULER}._update_waiting_for_remote_kv", reads=("request",), part=TRANSFERS)
def wrap_update_remote_kv(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records that the KV blocks of a request have arrived.

    On 0.17 this function also checks for the arrival, and returns `False` while blocks are missing.
    """

    def update_waiting_for_remote_kv(self: Any, request: Any) -> Any:
        result = original(self, request)
        fragment = getattr(request, "otel_infer", None)
        if hook.alive and fragment is not None and result is not False:
            try:
                _record_kv_transfer(request, fragment, _clock.now())
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return update_waiting_for_remote_kv
