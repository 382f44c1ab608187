"""Determines the outcome of a request from the exception that ended it."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.ringbuffer import events


def classify_exception(exc: BaseException | None) -> tuple[int, str]:
    """Returns outcome and error type; `OK` and "" for None.

    A timeout aborts the request. So does an exception that is no `Exception`: it cancels a task, closes a
    generator or stops the process.
    """
    if exc is None:
        return events.OK, ""
    if isinstance(exc, TimeoutError):
        return events.ABORTED, semconv.ERROR_TIMEOUT
    if isinstance(exc, Exception):
        return events.ERROR, type(exc).__qualname__
    return events.ABORTED, semconv.ERROR_CANCELLED
