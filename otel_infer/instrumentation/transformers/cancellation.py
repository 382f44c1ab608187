"""Hook that records the cancelled sequences of continuous batching.

Manager.cancel_request ─▶ set_request_cancellation ─▶ (next step) clear_cancelled_requests
                                                      finished
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import instrumentor
from otel_infer.instrumentation.transformers.continuous_batching import PART, SCHEDULER, remove_from_batch
from otel_infer.instrumentation.transformers.sequence_group import record_finished


@instrumentor.patch_hot_path(
    f"{SCHEDULER}:Scheduler.set_request_cancellation", reads=("request_id",), part=PART
)
def wrap_set_request_cancellation(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Gives the scheduler a `clear_cancelled_requests` of its own, for the one call that clears this request.

    Each step calls that function, so it enters no frame of ours unless a request was cancelled.
    """

    def set_request_cancellation(self: Any, request_id: str) -> Any:
        if hook.alive:
            try:
                self.clear_cancelled_requests = partial(_clear_cancelled_requests, self, hook)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, request_id)

    return set_request_cancellation


def _clear_cancelled_requests(scheduler: Any, hook: Hook) -> Any:
    """Clears the cancelled requests, and records them as aborted."""
    vars(scheduler).pop("clear_cancelled_requests", None)
    cancelled: list[Any] = []
    if hook.alive:
        try:
            cancelled = _find_states(scheduler, tuple(scheduler._requests_to_cancel))
        except Exception as exc:
            hook.mark_failed(exc)
    result = type(scheduler).clear_cancelled_requests(scheduler)
    if (result or cancelled) and hook.alive:
        try:
            # Releases before 5.7 do not return the removed states.
            for state in cancelled if result is None else result:
                remove_from_batch(scheduler, state)
                record_finished(state, "abort")
        except Exception as exc:
            hook.mark_failed(exc)
    return result


def _find_states(scheduler: Any, request_ids: tuple[Any, ...]) -> list[Any]:
    active, waiting = scheduler.active_requests, scheduler.waiting_requests
    states = [active.get(request_id) or waiting.get(request_id) for request_id in request_ids]
    return [state for state in states if state is not None]
