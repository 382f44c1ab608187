"""What a request takes along into another process, and what it is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation, request_span, start
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()
    propagation._fragments.clear()


@pytest.fixture
def request_(recording: Recording) -> request_span.RequestSpan:
    request = start.open_request("POST /", owner="test")
    assert request is not None
    return request


def test_what_is_stated_of_a_part_is_stated_of_its_request(
    recording: Recording, request_: request_span.RequestSpan
) -> None:
    part = propagation.join_request(propagation.inject(request_))
    assert part is not None
    part.record_event(events.EngineFinished(_clock.now(), "stop", 3))
    propagation.release(part)
    request_.close()
    (record,) = recording.records()
    assert (record.finish_reasons, record.output_tokens) == (("stop",), 3)
    assert recording.in_flight == 0


def test_others_read_the_standard_headers_beside_it(request_: request_span.RequestSpan) -> None:
    said = propagation.inject(request_)
    assert said["traceparent"].split("-")[1:3] == [
        said[propagation.REQUEST_HEADER][:32],
        said[propagation.REQUEST_HEADER][32:],
    ]


def test_sequences_of_a_request_are_one_part_until_the_last_has_left(
    request_: request_span.RequestSpan,
) -> None:
    said = propagation.inject(request_)
    one, other = propagation.join_request(said), propagation.join_request(said)
    assert one is other is not None
    propagation.release(one)
    assert propagation._fragments != {}
    propagation.release(one)
    assert propagation._fragments == {}
    again = propagation.join_request(said)
    assert again is not None and again is not one


@pytest.mark.parametrize("mark", ["", "ab", "x" * 48, "é" * 48, "00" * 23])
def test_what_is_no_mark_of_ours_is_nobodys(recording: Recording, mark: str) -> None:
    assert propagation.join_request({propagation.REQUEST_HEADER: mark}) is None
    assert propagation.join_request({}) is None
    assert propagation.join_request(None) is None


def test_a_part_that_found_no_room_says_nothing(request_: request_span.RequestSpan) -> None:
    nobody = propagation.RequestFragment(0, b"x" * 8, 0)
    nobody.record_event(events.RequestReceived(_clock.now()))
    assert nobody.packed == bytes(4)
