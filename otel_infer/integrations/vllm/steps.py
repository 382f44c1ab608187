"""The engine core, step by step: two facts per step, on the thread that schedules.

    schedule ─▶ (workers) ─▶ update_from_output
    scheduled                done

Two steps may be in flight (asynchronous scheduling, pipelines), so a step is known again at its end by its
`SchedulerOutput`. Who is in it are the keys of one of its dictionaries, in order: the running ones, then who was resumed or
is new. What was computed for a request that ended meanwhile is discarded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from otel_infer import clock
from otel_infer.integrations.vllm._integration import ENGINE, integration
from otel_infer.patching import Hook
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
PART = "engine core"

_id_of = attrgetter("request_id")
_new_tokens_of = attrgetter("new_token_ids")
_outputs_of = attrgetter("outputs")


class _Flight:
    """A step between schedule and update."""

    __slots__ = ("gone", "members", "output", "step")

    def __init__(self, step: int, output: Any, members: list[str]) -> None:
        self.step, self.output, self.members, self.gone = step, output, members, 0


class Batches:
    """The steps of one scheduler."""

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.left: list[str] = []
        self.flights: deque[_Flight] = deque(maxlen=8)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """A batch was composed; one of nothing is none."""
        tokens = output.num_scheduled_tokens
        if not tokens:
            return
        members = list(tokens)
        column = (
            b""
            if output.total_num_scheduled_tokens == len(members)
            else array("I", tokens.values()).tobytes()
        )
        left, self.left = self.left, []
        step = self.log.scheduled(members, left, column, *_load(scheduler))
        self.flights.append(_Flight(step, output, members))

    def landed(self, output: Any) -> _Flight | None:
        """The step with this output is over; None for one that nobody saw scheduled."""
        for flight in self.flights:
            if flight.output is output:
                self.flights.remove(flight)
                return flight
        return None

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

    def leave(self, request_id: str) -> None:
        """A request is no longer in the batch; what is in flight for it will be thrown away."""
        self.left.append(request_id)
        for flight in self.flights:
            flight.gone += request_id in flight.output.num_scheduled_tokens


def _load(scheduler: Any) -> tuple[int, int, int, int]:
    """KV blocks used and in all, requests running and waiting."""
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1  # one is nobody's
    waiting = len(scheduler.waiting) + len(getattr(scheduler, "kv_holding_waiting", ()))
    return total - pool.get_num_free_blocks(), total, len(scheduler.running), waiting


def batches_of(scheduler: Any) -> Batches | None:
    """The steps of this scheduler; None where nobody records."""
    found: Batches | None = getattr(scheduler, "otel_infer_batches", None)
    if found is None or not found.log.alive:
        log = recorder.step_log(ENGINE)
        if log is None:
            return None
        found = scheduler.otel_infer_batches = Batches(log)
    return found


def left_batch(scheduler: Any, request_id: str, is_over: bool) -> None:
    """A request was freed, or preempted and comes back."""
    batches: Batches | None = getattr(scheduler, "otel_infer_batches", None)
    if batches is not None:
        batches.leave(request_id)
        if is_over:
            batches.log.handles.pop(request_id, None)
        if not scheduler.running and not batches.flights:
            batches.left = []
            batches.log.idle()


@integration.step_hook(f"{SCHEDULER}.schedule", part=PART)
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


@integration.step_hook(f"{SCHEDULER}.update_from_output", reads=("scheduler_output",), part=PART)
def update_from_output(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        at, flight = clock.now(), None
        batches: Batches | None = getattr(self, "otel_infer_batches", None)
        if batches is not None and hook.alive:
            try:
                flight = batches.landed(scheduler_output)
            except Exception as exc:
                hook.fail(exc)
        result = original(self, scheduler_output, *args, **kwargs)
        if flight is not None and batches is not None and hook.alive:
            try:
                batches.done(flight, at, list(chain.from_iterable(map(_outputs_of, result.values()))))
            except Exception as exc:
                hook.fail(exc)
        return result

    return update
