"""Records the batches of continuous batching: what was scheduled, and what each step delivered."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import KvBlockSizeRecorder
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.instrumentation.transformers._instrumentor import ENGINE
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import recorder

UNKNOWN_HANDLE = bytes(4)
MAX_FLIGHTS = 8

_get_state = attrgetter("state")
_get_handle = attrgetter("otel_infer_handle")
_get_query_length = attrgetter("query_length")
_get_scheduled_tokens = attrgetter("state.tokens_to_process")
_get_has_new_token = attrgetter("has_new_token")


class PythonFlight:
    """The fields of a step in flight that compiled code reads and writes as well."""

    step: int = 0
    first_future: Any = None
    states: Any = None
    decode_only = is_plain = True


class PythonTracker:
    """The fields of a tracker that compiled code reads and writes as well."""

    __slots__ = (
        "announce",
        "batch",
        "closed",
        "flight_type",
        "free_scale",
        "in_flight",
        "is_latest",
        "kv_total",
        "last_states",
        "read_free",
        "removed",
        "ring",
        "scheduler",
        "size_due_at",
        "timing_due_at",
    )

    scheduler: Any
    ring: Any
    batch: Any
    announce: Callable[[Any], None]
    in_flight: list[Any]
    last_states: list[Any]
    removed: list[Any]
    read_free: Callable[[], float]
    flight_type: Any
    timing_due_at: int
    size_due_at: int
    kv_total: int
    free_scale: int
    closed: bool
    is_latest: bool

    def make_latest(self) -> None:
        """Does nothing: Python code looks at all trackers."""


if TYPE_CHECKING:
    Flight = PythonFlight
    Tracker = PythonTracker
else:
    Flight = PythonFlight if native is None else native.StepFlight
    Tracker = PythonTracker if native is None else native.StepTracker


class InFlightBatch(Flight):
    """A step between schedule and update; `step` becomes 0 if it is recorded as done before its update.

    `token_column`: tokens delivered per member (u32), empty = one each. `chunk_positions`: members that get
    no token, because their prompt is not done. `decode_only`: each member is scheduled for one token.
    `is_plain`: each member gets one token. Most steps are plain, so the other values are class attributes.
    """

    token_column = b""
    chunk_positions: tuple[int, ...] = ()
    removed_states: tuple[Any, ...] = ()


class BatchTracker(Tracker):
    """Records the steps of one scheduler, on the thread that runs them.

    `read_free` times `free_scale` are the free blocks of the cache, of `kv_total`. The step at `timing_due_at`
    or after it is timed; until then the model runner `resting_runner` calls no hook. `announce` is called with the
    tracker when a step is due. `is_latest`: it is the `latest` of its loop, which has no other tracker.
    """

    __slots__ = ("blocks", "pid", "resting_runner", "writer")

    def __init__(self, writer: BatchWriter, scheduler: Any, announce: Callable[[BatchTracker], None]) -> None:
        cache = scheduler.cache
        self.writer, self.pid = writer, os.getpid()
        self.scheduler, self.announce = weakref.ref(scheduler), announce
        self.ring, self.batch, self.flight_type = writer.ring, writer, InFlightBatch
        self.resting_runner: Any = None
        self.timing_due_at, self.closed, self.is_latest = 0, False, False
        self.removed, self.last_states, self.in_flight = [], [], []
        self.read_free, self.free_scale, self.kv_total = kv_cache.find_free_blocks(cache)
        if native is not None:
            kv_cache.bind_pool(self, cache)
        self.blocks = KvBlockSizeRecorder(ENGINE, writer.number, kv_cache.tokens_per_block(cache))
        self._record_block_size(_clock.now())
        writer.pack_handles = _pack_handles

    def _record_block_size(self, at: int) -> None:
        self.blocks.record_if_due(at)
        self.size_due_at = self.blocks.due_at

    def add_flight(self, step: int, first_future: Any, states: list[Any]) -> InFlightBatch:
        """Adds a step of which each member gets one token; the oldest of more than `MAX_FLIGHTS` is dropped."""
        flight = InFlightBatch()
        flight.step, flight.first_future, flight.states = step, first_future, states
        if len(self.in_flight) >= MAX_FLIGHTS:
            del self.in_flight[0]
        self.in_flight.append(flight)
        self.make_latest()
        return flight

    def record_changed(
        self,
        active: dict[Any, Any],
        futures: list[Any],
        query_tokens: int,
        decode_only: bool,
        load: tuple[int, int, int, int],
        at: int,
    ) -> None:
        """Records a batch that is not the last one, or a keyframe. `load`: as in `BatchWriter.write_scheduled`.

        `query_tokens`: the sum of the tokens scheduled for its members.
        """
        prefills = _NO_PREFILLS if decode_only else _find_prefills(futures, query_tokens)
        scheduled_column = token_column = b""
        if len(futures) == len(active) and prefills is not None:
            states = list(active.values())
        else:
            states = list(map(_get_state, futures))
        if prefills is None:
            scheduled_column = _encode_scheduled_tokens(futures)
            token_column = array("I", map(_get_has_new_token, futures)).tobytes()
        several, unfinished = prefills or _NO_PREFILLS
        step = self.writer.write_scheduled(states, self.removed, scheduled_column, *load, several)
        flight = self.add_flight(step, futures[0], states)
        flight.decode_only = decode_only
        if token_column or unfinished:
            flight.is_plain, flight.token_column = False, token_column
            flight.chunk_positions = tuple(map(self.writer.find_position, unfinished))
        if self.removed:
            self.removed = []
            if at >= self.size_due_at:
                self._record_block_size(at)
        self.last_states = states

    def record_done(self, first_future: Any) -> None:
        """Records that the tokens of the step with this first future are on the host.

        Ignores a step of another scheduler.
        """
        flights = self.in_flight
        if flights[0].first_future is not first_future:
            if not any(flight.first_future is first_future for flight in flights):
                return
            while flights[0].first_future is not first_future:  # results of earlier steps are never fetched
                del flights[0]
        flight = flights.pop(0)
        if not flight.step:
            return
        column, discarded = flight.token_column, 0
        if flight.removed_states:
            column, discarded = _discard_tokens(flight)
        elif flight.chunk_positions:
            self.writer.write_done_except(flight.step, [(position, 0) for position in flight.chunk_positions])
            return
        if column:
            self.writer.write_done(flight.step, column, len(flight.states), discarded)
        else:
            self.writer.write_single_tokens(flight.step, _clock.now(), discarded)

    def discard_in_flight(self, state: Any) -> None:
        """Counts the tokens in flight for a removed sequence as discarded."""
        for flight in self.in_flight:
            if (
                not flight.step
                or _contains_state(flight.removed_states, state)
                or not self._is_in_batch(flight, state)
            ):
                continue
            flight.removed_states += (state,)
            flight.is_plain = False
            # Without members left, the library may not fetch the step before the next request arrives.
            if len(flight.removed_states) == len(flight.states):
                column, discarded = _discard_tokens(flight)
                self.writer.write_done(flight.step, column, len(flight.states), discarded)
                flight.step = 0

    def _is_in_batch(self, flight: InFlightBatch, state: Any) -> bool:
        """Whether the sequence is in the step; for the latest step by bisection instead of a scan."""
        if flight is self.in_flight[-1]:
            return self.writer.find_position(state) >= 0
        return _contains_state(flight.states, state)

    def close(self) -> None:
        """Returns the batch writer to the recorder; its next user must not see the steps in flight."""
        self.closed = True
        self.end_rest()
        self.in_flight.clear()
        self.ring = self.batch = None
        self.last_states = []
        recorder.release_batch_writer(ENGINE, self.writer)

    def end_rest(self) -> None:
        """Lets the model runner call its hook again."""
        runner, self.resting_runner = self.resting_runner, None
        if runner is not None:
            vars(runner).pop("compute_batch", None)

    def on_idle(self) -> None:
        """Clears the batch if no step is in flight, so that finished sequences are not kept alive."""
        if not self.in_flight:
            self.removed, self.last_states = [], []
            self.writer.clear_batch()
            self._record_block_size(_clock.now())


def _contains_state(states: Iterable[Any], state: Any) -> bool:
    return any(map(is_, states, repeat(state)))


def _discard_tokens(flight: InFlightBatch) -> tuple[bytes, int]:
    column = array("I", flight.token_column or array("I", repeat(1, len(flight.states))).tobytes())
    for position in flight.chunk_positions:
        column[position] = 0
    discarded = 0
    for state in flight.removed_states:
        matches = list(map(is_, flight.states, repeat(state)))
        if True in matches and column[matches.index(True)]:
            column[matches.index(True)] = 0
            discarded += 1
    return column.tobytes(), discarded


MAX_PREFILLS = 16
_Prefills = tuple[Sequence[tuple[Any, int]], Sequence[Any]]
_NO_PREFILLS: _Prefills = (), ()


def _find_prefills(futures: list[Any], query_tokens: int) -> _Prefills | None:
    """Returns the states in prefill with their scheduled tokens, and the states with an unfinished prompt.

    Searches from the end, where the scheduler puts states in prefill. None if there are too many, or if
    `query_tokens` shows that not all other states are scheduled for one token.
    """
    several: list[tuple[Any, int]] = []
    unfinished: list[Any] = []
    surplus = query_tokens - len(futures)
    for future in reversed(futures):
        queries, has_new_token = getattr(future, "query_length", 0), future.has_new_token
        if queries == 1 and has_new_token:
            break
        if len(several) == MAX_PREFILLS - 1:
            return None
        several.append((future.state, queries))
        if not has_new_token:
            unfinished.append(future.state)
        surplus -= queries - 1
    return None if surplus else (several, unfinished)


def _encode_scheduled_tokens(futures: list[Any]) -> bytes:
    """Returns the tokens scheduled per member, as a u32 column."""
    try:
        return array("I", map(_get_query_length, futures)).tobytes()
    except AttributeError:
        return array("I", map(len, map(_get_scheduled_tokens, futures))).tobytes()


def _pack_handles(states: Any) -> bytes:
    try:
        return b"".join(map(_get_handle, states))
    except AttributeError:  # states that were created before the hooks were installed
        return b"".join(getattr(state, "otel_infer_handle", UNKNOWN_HANDLE) for state in states)
