"""The live request: what it makes of several reports of its end, and whether anything can hang from its span."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags

from otel_infer import facts, ingress
from otel_infer.records import RequestRecord
from tests.rings import Recording

ABOVE = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1))


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def opened() -> ingress.LiveRequest:
    """A request below a span of somebody else in this process."""
    with trace.use_span(NonRecordingSpan(ABOVE)):
        request = ingress.open_request("POST", owner="asgi", server=True)
    assert request is not None
    return request


def only(recording: Recording) -> RequestRecord:
    (record,) = recording.records()
    return record


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((facts.OK, ""), (facts.ERROR, "MemoryError")),
        ((facts.ERROR, "503"), (facts.ERROR, "MemoryError")),
        ((facts.ABORTED, "timeout"), (facts.ABORTED, "timeout")),
    ],
)
def test_what_the_engine_failed_of_goes_before_what_the_server_made_of_it(
    recording: Recording, said: tuple[int, str], expected: tuple[int, str]
) -> None:
    request = opened()
    request.failed("MemoryError")
    request.failed("RuntimeError")
    request.close(*said)
    record = only(recording)
    assert (record.outcome, record.error_type) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((StatusCode.ERROR,), (facts.ERROR, "_OTHER")),
        ((StatusCode.ERROR, StatusCode.OK), (facts.OK, "")),
        ((StatusCode.UNSET,), (facts.OK, "")),
    ],
)
def test_the_status_that_user_code_set_last_counts(
    recording: Recording, codes: tuple[StatusCode, ...], expected: tuple[int, str]
) -> None:
    request = opened()
    for code in codes:
        request.set_status(code)
    request.close()
    record = only(recording)
    assert (record.outcome, record.error_type) == expected


def test_a_status_says_less_than_what_was_raised(recording: Recording) -> None:
    request = opened()
    request.set_status(StatusCode.ERROR)
    request.close(facts.ERROR, "ValueError")
    assert only(recording).error_type == "ValueError"


def test_whoever_asks_after_the_end_of_a_request_that_nobody_asked_is_told_of_the_span_above(
    recording: Recording,
) -> None:
    request = opened()
    request.close()
    assert request.get_span_context() == ABOVE
    assert only(recording).redundant


def test_a_span_whose_id_somebody_was_told_keeps_it(recording: Recording) -> None:
    request = opened()
    told = request.get_span_context()
    request._withdraw()  # as if it had been asked in the midst of its end
    request.close()
    assert request.get_span_context() == told != ABOVE
    assert not only(recording).redundant


def test_a_request_that_is_somebodys_root_stays(recording: Recording) -> None:
    request = ingress.open_request("POST", owner="asgi")
    assert request is not None
    request.close()
    assert not only(recording).redundant
