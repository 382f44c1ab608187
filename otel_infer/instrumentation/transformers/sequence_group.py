"""The sequences of one request of continuous batching, and the record of their ends.

A `RequestState` carries its group as the attribute `otel_infer`, and the packed handle as `otel_infer_handle`.
"""

from __future__ import annotations

import threading
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.transformers.batch_tracker import UNKNOWN_HANDLE
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span


class PackedHandle(bytes):
    """A request's handle as 4 bytes, as `BatchWriter` writes it; pickled, it becomes the unknown handle.

    A handle is valid in its own process only.
    """

    def __deepcopy__(self, memo: Any) -> PackedHandle:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (UNKNOWN_HANDLE,)


class SequenceGroup:
    """The sequences of one `add_request`. `own`: the request was opened for them and ends with the last."""

    __slots__ = ("owns_request", "packed", "remaining", "request")

    def __init__(self, request: request_span.RequestSpan, own: bool, left: int) -> None:
        self.request, self.owns_request, self.remaining = request, own, left
        self.packed = PackedHandle(request.packed)

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self  # a fork belongs to the same request

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()  # other ranks of a tensor-parallel group get pickled copies of the states

    def finish_sequence(self, state: Any, reason: str, error_type: str = "") -> None:
        """Records the end of a sequence, and counts off the forks that it can no longer have.

        `reason`: stop, length, abort or error.
        """
        # A soft reset moves the tokens generated so far into the initial tokens of the new state.
        moved = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
        tokens = len(state.generated_tokens) + moved
        self.request.record_event(events.EngineFinished(_clock.now(), reason, tokens))
        if error_type:
            self.request.set_engine_error(error_type)
        self.remaining -= 1 + int(state.num_children or 0)
        if self.owns_request and self.remaining <= 0:
            self.request.close()


class _AddRequestState(threading.local):
    """The sequence group for which this thread creates states; None outside `add_request`."""

    group: SequenceGroup | None = None


adding = _AddRequestState()


def record_finish(state: Any) -> None:
    """Records the end of a sequence that has all its tokens, unless it continues in another state."""
    successor = getattr(state, "otel_infer_successor", None)
    goes_on = successor is not None and successor.request_id == state.request_id
    if state.status.name == "FINISHED" and not goes_on:
        last = state.generated_tokens[-1:]
        record_finished(state, "stop" if last and last[0] in state._eos_token_ids else "length")


def record_finished(state: Any, reason: str, error_type: str = "") -> None:
    """Records the end of a sequence, once. `reason`, `error_type`: as in `SequenceGroup.finish_sequence`."""
    group = getattr(state, "otel_infer", None)
    if group is not None:
        state.otel_infer = None
        group.finish_sequence(state, reason, error_type)
