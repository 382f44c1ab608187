"""Hooks that record the sequences of continuous batching, added in any thread, finished in the manager's.

    Manager.add_request ─▶ RequestState ─▶ add_waiting_request ─▶ schedule_batch … ─▶ finish_request
    submitted              carries it      received                                   finished

A `RequestState` carries its request as an attribute, so nothing is looked up by id. Further sequences of a
request are forks of its first state. A preempted sequence continues in the same state (KV offloaded to the
host) or in a new state (KV recomputed). `continuous_batching` records the steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import (
    ENGINE,
    instrumentor,
    name_request,
    open_own_request,
)
from otel_infer.instrumentation.transformers.batch_tracker import UNKNOWN_HANDLE
from otel_infer.instrumentation.transformers.compiled_requests import OPERATION, compile_request_hook
from otel_infer.instrumentation.transformers.continuous_batching import (
    CB,
    MANAGER,
    PART,
    PROCESSOR,
    SCHEDULER,
    remove_from_batch,
)
from otel_infer.instrumentation.transformers.generation_arguments import prompt_length
from otel_infer.instrumentation.transformers.sequence_group import (
    SequenceGroup,
    adding,
    record_finish,
    record_finished,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.outcome import classify_exception

_STATE = f"{CB}.requests:RequestState"


# ── submission ───────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{MANAGER}.add_request", reads=("input_ids", "max_new_tokens"), part=PART)
def wrap_add_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records the submission, and binds the states that are created meanwhile to the request."""
    limit_position = list(inspect.signature(original).parameters).index("max_new_tokens") - 1

    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = None
        if hook.alive and getattr(self, "is_tp_driver", True):
            try:
                limit = kwargs.get("max_new_tokens")
                limit = args[limit_position] if len(args) > limit_position else limit
                group = _begin_group(self, args[0] if args else kwargs.get("input_ids"), limit)
            except Exception as exc:
                hook.mark_failed(exc)
        if group is None:
            return original(self, *args, **kwargs)
        adding.group = group
        try:
            accepted = original(self, *args, **kwargs)
        except BaseException as exc:
            if group.owns_request:
                group.request.close(*classify_exception(exc))
            raise
        finally:
            adding.group = None
        if accepted is None and group.owns_request:
            group.request.close(events.ERROR, "rejected")
        return accepted

    return compile_request_hook("add request", original, hook, add_request)


def _begin_group(manager: Any, input_ids: Any, limit: Any) -> SequenceGroup | None:
    """Records that a prompt is submitted; returns its sequences, None while nothing is recorded."""
    request = start.current_request()
    own = request is None
    if request is None:
        request = open_own_request(OPERATION, manager.model)
        if request is None:
            return None
    else:
        name = getattr(manager, "_otel_infer_model", None)
        if name is None:  # reading it searches all modules of the model
            name = manager._otel_infer_model = read_model_name(manager.model)
        name_request(request, OPERATION, name)
    if limit is None:
        limit = getattr(manager.generation_config, "max_new_tokens", None)
    copies = events.clamp_count(getattr(manager, "num_return_sequences", 1)) or 1
    request.record_submitted(ENGINE, copies, prompt_length(input_ids), limit)
    return SequenceGroup(request, own, copies)


@instrumentor.patch_hot_path(f"{_STATE}.__post_init__", part=PART)
def wrap_post_init(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def post_init(self: Any) -> None:
        original(self)
        if not hook.alive:
            return
        try:
            group = self.otel_infer = adding.group
            self.otel_infer_handle = UNKNOWN_HANDLE if group is None else group.packed
            if group is not None:
                group.request.set_request_id(str(self.request_id))
        except Exception as exc:
            hook.mark_failed(exc)

    return compile_request_hook("state", original, hook, post_init)


@instrumentor.patch_hot_path(f"{_STATE}.fork", part=PART)
def wrap_fork(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Binds a fork to the same request: another of the sequences to return."""

    def fork(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        if hook.alive:
            try:
                _inherit_request(state, self)
            except Exception as exc:
                hook.mark_failed(exc)
        return state

    return fork


@instrumentor.patch_hot_path(f"{_STATE}.create_equivalent_initial_request", part=PART)
def wrap_create_equivalent(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Binds a new state to the same request, after a soft reset or for a fork that did not fit.

    If the id stays the same, the sequence continues in the new state.
    """

    def create_equivalent(self: Any) -> Any:
        state = original(self)
        if hook.alive:
            try:
                _inherit_request(state, self)
                state.otel_infer_predecessor, self.otel_infer_successor = self, state
            except Exception as exc:
                hook.mark_failed(exc)
        return state

    return create_equivalent


def _inherit_request(state: Any, parent: Any) -> None:
    state.otel_infer = getattr(parent, "otel_infer", None)
    state.otel_infer_handle = getattr(parent, "otel_infer_handle", UNKNOWN_HANDLE)


@instrumentor.patch_hot_path(f"{SCHEDULER}:Scheduler.add_waiting_request", reads=("state",), part=PART)
def wrap_add_waiting_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def add_waiting_request(self: Any, state: Any) -> Any:
        group = getattr(state, "otel_infer", None)
        if group is not None and hook.alive:
            try:
                _record_queued(self, state, group.request)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, state)

    return compile_request_hook("add waiting request", original, hook, add_waiting_request)


def _record_queued(scheduler: Any, state: Any, request: request_span.RequestSpan) -> None:
    before = getattr(state, "otel_infer_predecessor", None)
    state.otel_infer_predecessor = None
    if before is not None and before.request_id == state.request_id:
        remove_from_batch(scheduler, before)
        request.record_event(events.RequestPreempted(_clock.now(), "recompute"))
    elif getattr(state, "is_cpu_offloaded", False):
        remove_from_batch(scheduler, state)
        request.record_event(events.RequestPreempted(_clock.now(), "offload"))
    else:
        request.record_event(events.RequestReceived(_clock.now()))


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{SCHEDULER}:Scheduler.finish_request", reads=("request_id",), part=PART)
def wrap_finish_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def finish_request(self: Any, request_id: str) -> Any:
        state = self.active_requests.get(request_id) if hook.alive else None
        result = original(self, request_id)
        if state is not None:
            try:
                remove_from_batch(self, state)
                record_finish(state)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return compile_request_hook("finish request", original, hook, finish_request)


@instrumentor.patch_hot_path(f"{PROCESSOR}._handle_request_error", reads=("error", "state"), part=PART)
def wrap_handle_request_error(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def handle_request_error(self: Any, error: Any, state: Any) -> Any:
        result = original(self, error, state)
        _record_failure(hook, state, error)
        return result

    return handle_request_error


_ROUTER = f"{CB}.continuous_api:OutputRouter"


@instrumentor.patch_hot_path(
    f"{_ROUTER}.fail_and_deliver", reads=("state", "error"), optional=True, part=PART
)
def wrap_fail_and_deliver(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records a failure before it is delivered, because its consumer may end the request at once.

    `_handle_request_error` calls this function; the manager calls it directly where no processor could be
    created.
    """

    def fail_and_deliver(self: Any, state: Any, error: Any) -> Any:
        _record_failure(hook, state, error)
        return original(self, state, error)

    return fail_and_deliver


def _record_failure(hook: Hook, state: Any, error: Any) -> None:
    if hook.alive:
        try:
            record_finished(state, "error", type(error).__qualname__)
        except Exception as exc:
            hook.mark_failed(exc)
