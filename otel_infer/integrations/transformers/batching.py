"""Continuous batching: requests are added in any thread, one thread of the manager runs all steps.

    add_request ─▶ RequestState ─▶ add_waiting_request ─▶ schedule_batch ─▶ forward ─▶ prepare_batch_update ─▶ finish_request
    submitted      (carries it)    received               scheduled                    done                    finished

A `RequestState` carries its live request as an attribute, so nothing is looked up by id. With asynchronous batching two
steps are in flight, and what was scheduled for a request that finished meanwhile is discarded.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from otel_infer import clock, facts, ingress
from otel_infer.integrations._claims import claiming
from otel_infer.integrations.transformers._integration import ENGINE, integration, name_request, own_request
from otel_infer.patching import Call, Hook
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder

_CB = "transformers.generation.continuous_batching"
_MANAGER = f"{_CB}.continuous_api:ContinuousBatchingManager"
_PROCESSOR = f"{_CB}.continuous_api:ContinuousBatchProcessor"
_SCHEDULER = f"{_CB}.scheduler"
_STATE = f"{_CB}.requests:RequestState"
PART = "continuous batching"
OPERATION = "text_completion"
WARMUP = "__warmup_"

_state_of = attrgetter("state")
_packed_of = attrgetter("otel_infer_handle")
_query_of = attrgetter("query_length")
_new_token_of = attrgetter("has_new_token")
_UNKNOWN = bytes(4)


class _Flight:
    """A step between schedule and update. `column`: tokens delivered per member, empty = one each."""

    __slots__ = ("column", "gone", "states", "step")

    def __init__(self, step: int, states: list[Any], column: bytes) -> None:
        self.step, self.states, self.column = step, states, column
        self.gone: list[Any] = []


class _Batches:
    """The steps of one scheduler, on the thread that runs them."""

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.left: list[Any] = []
        self.flights: deque[_Flight] = deque(maxlen=8)
        self.offloading = False
        log.pack = _pack

    def scheduled(self, scheduler: Any, futures: list[Any], query_tokens: int) -> None:
        states = list(map(_state_of, futures))
        size = len(states)
        plain = query_tokens == size and futures[-1].has_new_token and not scheduler._requests_to_fork
        tokens = b"" if plain else array("I", map(_query_of, futures)).tobytes()
        column = b"" if plain else array("I", map(_new_token_of, futures)).tobytes()
        used, total = _kv(scheduler.cache)
        running, waiting = len(scheduler.active_requests), len(scheduler.waiting_requests)
        step = self.log.scheduled(states, self.left, tokens, used, total, running, waiting)
        if self.left:
            self.left = []
        self.flights.append(_Flight(step, states, column))

    def done(self) -> None:
        flight = self.flights.popleft()
        column, discarded = flight.column, 0
        if flight.gone:
            column, discarded = _discarding(flight)
        self.log.done(flight.step, column, len(flight.states), discarded)

    def gone(self, state: Any) -> None:
        """A sequence left the batch: whatever is still in flight for it will be discarded."""
        self.left.append(state)
        for flight in self.flights:
            flight.gone.append(state)


def _discarding(flight: _Flight) -> tuple[bytes, int]:
    column = array("I", flight.column or array("I", repeat(1, len(flight.states))).tobytes())
    discarded = 0
    for state in flight.gone:
        found = list(map(is_, flight.states, repeat(state)))
        if True in found and column[found.index(True)]:
            column[found.index(True)] = 0
            discarded += 1
    return column.tobytes(), discarded


def _pack(states: Any) -> bytes:
    try:
        return b"".join(map(_packed_of, states))
    except AttributeError:  # some began before we were here
        return b"".join(getattr(state, "otel_infer_handle", _UNKNOWN) for state in states)


def _kv(cache: Any) -> tuple[int, int]:
    """KV blocks (used, total), in blocks of the first allocator; one look at a free list, whatever the batch."""
    total = int(getattr(cache, "num_blocks", 0) or 0)
    free = cache.compute_free_capacity()
    return total - int(free * total), total


def _batches_of(scheduler: Any) -> _Batches | None:
    batches: _Batches | None = getattr(scheduler, "_otel_infer_batches", None)
    if batches is None or not batches.log.alive:
        log = recorder.step_log(ENGINE)
        if log is None:
            return None
        batches = scheduler._otel_infer_batches = _Batches(log)
    return batches


# ── a request's way in ───────────────────────────────────────────────────────────────────────────────────────────


@integration.around(f"{_MANAGER}.add_request", reads=("input_ids", "max_new_tokens"), part=PART)
def add_request(call: Call) -> Generator[None, Any, None]:
    manager = call.instance
    request = ingress.current()
    own = request is None
    request = request or own_request(OPERATION, manager.model)
    if request is None:
        yield
        return
    if not own:
        name_request(request, OPERATION, manager.model)
    limit = call["max_new_tokens"] or getattr(manager.generation_config, "max_new_tokens", None) or 0
    copies = int(getattr(manager, "num_return_sequences", 1) or 1)
    request.submitted(ENGINE, copies, len(call["input_ids"]), int(limit))
    token = request.attach() if own else None
    try:
        accepted = yield
    except BaseException as exc:
        if own:
            request.close(facts.ERROR, type(exc).__qualname__)
        raise
    finally:
        if token is not None:
            ingress.detach(token)
    if accepted is None and own:
        request.close(facts.ERROR, "rejected")


@integration.step_hook(f"{_STATE}.__post_init__", part=PART)
def new_state(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def post_init(self: Any) -> None:
        original(self)
        request = ingress.current()
        self.otel_infer = request
        self.otel_infer_handle = request.packed if request is not None else _UNKNOWN

    return post_init


@integration.step_hook(f"{_STATE}.create_equivalent_initial_request", part=PART)
def same_again(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A soft reset: the sequence goes on in another state object."""

    def create(self: Any) -> Any:
        state = original(self)
        state.otel_infer = getattr(self, "otel_infer", None)
        state.otel_infer_handle = getattr(self, "otel_infer_handle", _UNKNOWN)
        return state

    return create


@integration.step_hook(f"{_SCHEDULER}:Scheduler.add_waiting_request", reads=("state",), part=PART)
def add_waiting_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add(self: Any, state: Any) -> Any:
        request = getattr(state, "otel_infer", None)
        if request is not None and hook.alive:
            request.state(facts.RequestReceived(clock.now()))
        return original(self, state)

    return add


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _scheduling(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def schedule_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hook.alive and recorder.active:
            try:
                futures = result[0]
                if futures and not futures[0].state.request_id.startswith(WARMUP):
                    batches = _batches_of(self)
                    if batches is not None:
                        batches.scheduled(self, futures, result[2])
            except Exception as exc:
                hook.fail(exc)
        return result

    return schedule_batch


for _class in ("FIFOScheduler", "PrefillFirstScheduler"):
    integration.step_hook(f"{_SCHEDULER}:{_class}.schedule_batch", part=PART)(_scheduling)


class _Updating(threading.local):
    """Whose results this thread is taking in."""

    batches: _Batches | None = None


_updating = _Updating()


@integration.step_hook(f"{_PROCESSOR}.update_batch", part=PART)
def update_batch(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def update(self: Any) -> Any:
        _updating.batches = getattr(self.scheduler, "_otel_infer_batches", None)
        try:
            return original(self)
        finally:
            _updating.batches = None

    return update


@integration.step_hook(f"{_CB}.input_outputs:ContinuousBatchingIOs.prepare_batch_update", part=PART)
def prepare_batch_update(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Here the tokens are on the host, and nobody has been given them yet."""

    def prepare(self: Any) -> Any:
        result = original(self)
        batches = _updating.batches
        if batches is not None and batches.flights and hook.alive:
            try:
                batches.done()
            except Exception as exc:
                hook.fail(exc)
        return result

    return prepare


for _target in (f"{_MANAGER}._run_generation_loop", f"{_PROCESSOR}.warmup"):
    integration.step_hook(_target, optional=True, part=PART)(claiming)


# ── a request's way out ──────────────────────────────────────────────────────────────────────────────────────────


@integration.step_hook(f"{_SCHEDULER}:Scheduler.finish_request", reads=("request_id",), part=PART)
def finish_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish(self: Any, request_id: str) -> Any:
        state = self.active_requests.get(request_id) if hook.alive else None
        result = original(self, request_id)
        if state is not None:
            try:
                _left(self, state)
            except Exception as exc:
                hook.fail(exc)
        return result

    return finish


@integration.step_hook(f"{_SCHEDULER}:Scheduler.clear_cancelled_requests", part=PART)
def clear_cancelled_requests(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def clear(self: Any) -> Any:
        cancelled = original(self)
        if cancelled and hook.alive:
            try:
                for state in cancelled:
                    _told(self, state)
                    _finished(state, "abort")
            except Exception as exc:
                hook.fail(exc)
        return cancelled

    return clear


@integration.step_hook(f"{_CB}.offloading_manager:OffloadingManager.offload_requests", part=PART)
def offload_requests(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def offload(self: Any) -> Any:
        batches = getattr(self.scheduler, "_otel_infer_batches", None)
        if batches is None:
            return original(self)
        batches.offloading = True
        try:
            return original(self)
        finally:
            batches.offloading = False

    return offload


@integration.step_hook(f"{_PROCESSOR}._handle_request_error", reads=("error", "state"), part=PART)
def handle_request_error(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def handle(self: Any, error: Any, state: Any) -> Any:
        result = original(self, error, state)
        if hook.alive:
            try:
                _finished(state, "error", type(error).__qualname__)
            except Exception as exc:
                hook.fail(exc)
        return result

    return handle


def _told(scheduler: Any, state: Any) -> None:
    batches = getattr(scheduler, "_otel_infer_batches", None)
    if batches is not None:
        batches.gone(state)


def _left(scheduler: Any, state: Any) -> None:
    _told(scheduler, state)
    batches = getattr(scheduler, "_otel_infer_batches", None)
    request = getattr(state, "otel_infer", None)
    if batches is not None and batches.offloading:
        if request is not None:
            kind = "offload" if state.is_cpu_offloaded else "recompute"
            request.state(facts.RequestPreempted(clock.now(), kind))
        return
    if state.status.name == "FINISHED":
        _finished(state, _reason(state))


def _reason(state: Any) -> str:
    last = state.generated_tokens[-1:]
    return "stop" if last and last[0] in state._eos_token_ids else "length"


def _finished(state: Any, reason: str, error_type: str = "") -> None:
    request = getattr(state, "otel_infer", None)
    if request is None:
        return
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    request.state(facts.EngineFinished(clock.now(), reason, len(state.generated_tokens) + before))
    if request.owner != ENGINE:
        if error_type:
            request.failed(error_type)
        return
    request.sequences_left -= 1
    if error_type:
        request.close(facts.ERROR, error_type)
    elif reason == "abort":
        request.close(facts.ABORTED, "cancelled")
    elif request.sequences_left <= 0:
        request.close()


# ── transfers: a section of their own with asynchronous batching ─────────────────────────────────────────────────


def _transfer(stage: str) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    def make(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def transfer(self: Any, stream: Any) -> Any:
            started_at = clock.now()
            result = original(self, stream)
            if hook.alive:
                try:
                    _transferred(self, stage, started_at)
                except Exception as exc:
                    hook.fail(exc)
            return result

        return transfer

    return make


def _transferred(pair: Any, stage: str, started_at: int) -> None:
    """Host time of a transfer, said on those whose first step it belongs to: a prefill, not every token."""
    futures = getattr(pair.host_io, "requests_in_batch", None) or ()
    if futures and futures[-1].query_length > 1:
        at = clock.now()
        for future in futures:
            request = getattr(future.state, "otel_infer", None)
            if request is not None and future.query_length > 1:
                request.stage(stage, started_at, at=at)


for _name, _stage in (("transfer_inputs_h2d", "h2d"), ("transfer_outputs_d2h", "d2h")):
    integration.step_hook(f"{_CB}.input_outputs:HostDeviceIOPair.{_name}", part="transfers")(_transfer(_stage))
