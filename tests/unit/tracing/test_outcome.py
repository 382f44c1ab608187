"""The outcome of a request that an exception ended."""

from __future__ import annotations

import asyncio

import pytest

from otel_infer.ringbuffer import events
from otel_infer.tracing.outcome import classify_exception


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (None, (events.OK, "")),
        (KeyError(), (events.ERROR, "KeyError")),
        (TimeoutError(), (events.ABORTED, "timeout")),
        (asyncio.CancelledError(), (events.ABORTED, "cancelled")),
        (GeneratorExit(), (events.ABORTED, "cancelled")),
        (KeyboardInterrupt(), (events.ABORTED, "cancelled")),
    ],
)
def test_exception_determines_outcome_and_error_type(
    exc: BaseException | None, expected: tuple[int, str]
) -> None:
    assert classify_exception(exc) == expected
