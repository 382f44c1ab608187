"""Continuous batching, step by step: one thread of the manager runs all steps of its scheduler.

    schedule_batch ─▶ prepare_batch_tensors ─▶ compute_batch ─▶ prepare_batch_update ─▶ finish_request
    scheduled                                  timed on device  done                    (see `sequences`)

A step is known again at its end by the first of its futures, which the library carries from one to the other. With
asynchronous batching two steps are in flight, and what was scheduled for a sequence that finished meanwhile is
discarded. Releases before 5.18 count free blocks, later ones a free share; before 5.6 a future has no query length.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from otel_infer.instrumentation.hooks.engines import Blocks
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import claiming
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.instrumentation.transformers._integration import ENGINE, integration
from otel_infer.ringbuffer.batch_writer import StepLog
from otel_infer.ringbuffer.recorder import recorder

CB = "transformers.generation.continuous_batching"
MANAGER = f"{CB}.continuous_api:ContinuousBatchingManager"
PROCESSOR = f"{CB}.continuous_api:ContinuousBatchProcessor"
SCHEDULER = f"{CB}.scheduler"
PART = "continuous batching"
UNKNOWN = bytes(4)

_state_of = attrgetter("state")
_packed_of = attrgetter("otel_infer_handle")
_query_of = attrgetter("query_length")
_scheduled_tokens_of = attrgetter("state.tokens_to_process")
_new_token_of = attrgetter("has_new_token")
_is_alive = attrgetter("log.alive")


class _Flight:
    """A step between schedule and update. `column`: tokens delivered per member, empty = one each, but for `chunks`:
    positions of those who get none. `plain`: everybody in it decodes."""

    __slots__ = ("chunks", "column", "first", "gone", "plain", "states", "step")

    def __init__(
        self, step: int, first: Any, states: list[Any], column: bytes, chunks: tuple[int, ...], plain: bool
    ) -> None:
        self.step, self.first, self.states, self.column, self.chunks = step, first, states, column, chunks
        self.plain = plain
        self.gone: tuple[Any, ...] = ()


class _Batches:
    """The steps of one scheduler, on the thread that runs them."""

    def __init__(self, log: StepLog, cache: Any) -> None:
        self.log, self.pid = log, os.getpid()
        self.over = False
        self.left: list[Any] = []
        self.flights: deque[_Flight] = deque(maxlen=8)
        self.kv = kv_cache.blocks_of(cache)
        self.blocks = Blocks(ENGINE, log.number, kv_cache.block_tokens(cache))
        self.blocks.say()
        log.pack = _pack

    def scheduled(self, scheduler: Any, futures: list[Any], query_tokens: int) -> None:
        active, size = scheduler.active_requests, len(futures)
        used, total = self.kv()
        plain = query_tokens == size and futures[-1].has_new_token and not scheduler._requests_to_fork
        odd = _NOBODY if plain else _odd_ones(futures, query_tokens)
        queries = column = b""
        chunks: tuple[int, ...] = ()
        # Who is scheduled is active, and nobody is twice: as many as are active are all of them.
        if size == len(active) and odd is not None:
            states = list(active.values())
        else:
            states = list(map(_state_of, futures))
        if odd is None:
            queries, column = _queries(futures), array("I", map(_new_token_of, futures)).tobytes()
        several, unfinished = odd or _NOBODY
        waiting = len(scheduler.waiting_requests)
        step = self.log.scheduled(states, self.left, queries, used, total, len(active), waiting, several)
        for state in unfinished:
            chunks += (self.log.position(state),)
        if self.left:
            self.left = []
            self.blocks.say()
        self.flights.append(_Flight(step, futures[0], states, column, chunks, plain))

    def done(self, first: Any) -> None:
        """The tokens of the step with this first future are on the host; another scheduler's is unknown here."""
        flights = self.flights
        if flights[0].first is not first:
            if not any(flight.first is first for flight in flights):
                return
            while flights[0].first is not first:  # the results of those before are never fetched
                flights.popleft()
        flight = flights.popleft()
        if not flight.step:
            return
        column, discarded = flight.column, 0
        if flight.gone:
            column, discarded = _discarding(flight)
        elif flight.chunks:
            self.log.done_except(flight.step, [(position, 0) for position in flight.chunks])
            return
        self.log.done(flight.step, column, len(flight.states), discarded)

    def gone(self, state: Any) -> None:
        """A sequence left the batch: whatever is still in flight for it will be discarded."""
        self.left.append(state)
        for flight in self.flights:
            if not flight.step or _has(flight.gone, state) or not self._is_in(flight, state):
                continue
            flight.gone += (state,)
            # Nobody waits for it, and the library may not fetch it before the next arrival.
            if len(flight.gone) == len(flight.states):
                column, discarded = _discarding(flight)
                self.log.done(flight.step, column, len(flight.states), discarded)
                flight.step = 0

    def _is_in(self, flight: _Flight, state: Any) -> bool:
        """The log finds a member of the batch that was stated last without looking at the others."""
        if flight is self.flights[-1]:
            return self.log.position(state) >= 0
        return _has(flight.states, state)

    def end(self) -> None:
        """Gives the log back; what was in flight is no step of whoever has it next."""
        self.over = True
        self.flights.clear()
        recorder.give_back(ENGINE, self.log)

    def idle(self) -> None:
        """Nothing is active: let go of the last batch."""
        if not self.flights:
            self.left = []
            self.log.idle()
            self.blocks.say()


def _has(states: Iterable[Any], state: Any) -> bool:
    return any(map(is_, states, repeat(state)))


def _discarding(flight: _Flight) -> tuple[bytes, int]:
    column = array("I", flight.column or array("I", repeat(1, len(flight.states))).tobytes())
    for position in flight.chunks:
        column[position] = 0
    discarded = 0
    for state in flight.gone:
        found = list(map(is_, flight.states, repeat(state)))
        if True in found and column[found.index(True)]:
            column[found.index(True)] = 0
            discarded += 1
    return column.tobytes(), discarded


MOST_ODD = 16
_Odd = tuple[Sequence[tuple[Any, int]], Sequence[Any]]
_NOBODY: _Odd = (), ()


def _odd_ones(futures: list[Any], query_tokens: int) -> _Odd | None:
    """Those who do not get one token for one: (state, tokens scheduled), and of these the states whose prompt is not done. Looked
    for at the end, where the scheduler puts whoever is in its prefill.

    None where they are too many or elsewhere: the sum says whether all others have one token each.
    """
    several: list[tuple[Any, int]] = []
    unfinished: list[Any] = []
    surplus = query_tokens - len(futures)
    for future in reversed(futures):
        queries, has_new_token = getattr(future, "query_length", 0), future.has_new_token
        if queries == 1 and has_new_token:
            break
        if len(several) == MOST_ODD - 1:
            return None
        several.append((future.state, queries))
        if not has_new_token:
            unfinished.append(future.state)
        surplus -= queries - 1
    return None if surplus else (several, unfinished)


def _queries(futures: list[Any]) -> bytes:
    """Tokens scheduled per member."""
    try:
        return array("I", map(_query_of, futures)).tobytes()
    except AttributeError:
        return array("I", map(len, map(_scheduled_tokens_of, futures))).tobytes()


def _pack(states: Any) -> bytes:
    try:
        return b"".join(map(_packed_of, states))
    except AttributeError:  # some began before we were here
        return b"".join(getattr(state, "otel_infer_handle", UNKNOWN) for state in states)


class _Loop(threading.local):
    """`made`: what the loop on this thread has made; `latest`: of these, the one that was scheduled last."""

    def __init__(self) -> None:
        self.made: list[_Batches] = []
        self.latest: _Batches | None = None


current_loop = _Loop()


def _batches_of(scheduler: Any) -> _Batches | None:
    batches: _Batches | None = getattr(scheduler, "_otel_infer_batches", None)
    if batches is None or batches.over or not batches.log.alive:
        log = recorder.step_log(ENGINE)
        if log is None:
            return None
        batches = scheduler._otel_infer_batches = _Batches(log, scheduler.cache)
        current_loop.made = [*filter(_is_alive, current_loop.made), batches]
    return batches


def _told(scheduler: Any, state: Any) -> None:
    """A sequence left the scheduler's batch."""
    batches: _Batches | None = getattr(scheduler, "_otel_infer_batches", None)
    if batches is not None and not batches.over:
        batches.gone(state)
        if not scheduler.active_requests:
            batches.idle()


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────


@integration.step_hook(f"{MANAGER}._run_generation_loop", optional=True, part=PART)
def run_loop(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A loop that ends gives its step log back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            try:
                _release()
            except Exception as exc:
                hook.fail(exc)

    return run


def _release() -> None:
    made, current_loop.made, current_loop.latest = current_loop.made, [], None
    for batches in made:
        batches.end()


for _target in (f"{MANAGER}._run_generation_loop", f"{PROCESSOR}.warmup"):
    integration.step_hook(_target, optional=True, part=PART)(claiming)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _scheduling(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hook.alive and recorder.active:
            try:
                futures = result[0]
                if futures:
                    batches = _batches_of(self)
                    current_loop.latest = batches
                    if batches is not None:
                        batches.scheduled(self, futures, result[2])
            except Exception as exc:
                hook.fail(exc)
        return result

    return schedule_batch


for _class in ("FIFOScheduler", "PrefillFirstScheduler"):
    integration.step_hook(f"{SCHEDULER}:{_class}.schedule_batch", part=PART)(_scheduling)


@integration.step_hook(f"{CB}.input_outputs:ContinuousBatchingIOs.prepare_batch_update", part=PART)
def prepare_batch_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Here the tokens are on the host, and nobody has been given them yet."""

    def prepare(self: Any) -> Any:
        result = original(self)
        if hook.alive:
            try:
                for batches in current_loop.made:
                    if batches.flights and result[0]:
                        batches.done(result[0][0])
            except Exception as exc:
                hook.fail(exc)
        return result

    return prepare
