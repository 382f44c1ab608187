"""A function that is called in another process, as a part of the request that submitted it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.waits import record_wait
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import propagation
from otel_infer.tracing.batch_request import BatchRequest, combine_requests
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan

Headers = dict[str, str]


class ProcessCall:
    """Takes the place of a function of a job, which is pickled in it.

    `headers`: of the request, or of each request of a batch. `size`: of the pool. `submitted_at`: monotonic ns; 0 = a
    wait is not recorded.
    """

    __slots__ = ("_call", "_headers", "_size", "_submitted_at")

    def __init__(
        self, call: Callable[..., Any], headers: Sequence[Headers], size: int, submitted_at: int
    ) -> None:
        self._call, self._headers, self._size, self._submitted_at = call, headers, size, submitted_at

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        parts = join_requests(self._headers)
        if not parts:
            return self._call(*args, **kwargs)
        submitted_at, self._submitted_at = self._submitted_at, 0  # the other calls of a `map` follow this one
        request = combine_requests(parts)
        if submitted_at:
            record_wait(request, events.POOL_WAIT, submitted_at, self._size)
        token = request.attach()
        try:
            return request.call_in_thread(self._call, *args, **kwargs)
        finally:
            detach(token)
            close_requests(parts)


def close_requests(parts: Sequence[RequestSpan]) -> None:
    """Closes joined requests. No exception of ours leaves it."""
    try:
        for part in parts:
            part.close()
    except Exception as error:
        recorder.report_lost_event(error)


def make_process_call(call: Callable[..., Any], request: RequestSpan, size: int) -> ProcessCall:
    """Returns what is submitted to a pool of this size instead of a function of the request."""
    has_no_token = not (request.tokens_reached or request.responding)
    return ProcessCall(call, list_headers(request), size, _clock.now() if has_no_token else 0)


def list_headers(request: RequestSpan) -> list[Headers]:
    """Returns the headers of a request, or of each request of a batch."""
    members = request.members if isinstance(request, BatchRequest) else (request,)
    return [propagation.inject(member) for member in members if not member.ended]


def join_requests(headers: Sequence[Headers]) -> list[RequestSpan]:
    """Returns the requests that the headers carry, as live spans of this process; requests that are not recorded are left out."""
    parts = [propagation.join_as_span(each) for each in headers]
    return [part for part in parts if part is not None]
