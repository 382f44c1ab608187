"""Propagates a request to another process: its headers and its state there."""

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


def test_events_of_a_fragment_belong_to_its_request(
    recording: Recording, request_: request_span.RequestSpan
) -> None:
    fragment = propagation.join_request(propagation.inject(request_))
    assert fragment is not None
    fragment.record_event(events.EngineFinished(_clock.now(), "stop", 3))
    propagation.release(fragment)
    request_.close()
    (record,) = recording.records()
    assert (record.finish_reasons, record.output_tokens) == (("stop",), 3)
    assert recording.in_flight == 0


def test_traceparent_matches_the_request_header(request_: request_span.RequestSpan) -> None:
    headers = propagation.inject(request_)
    assert headers["traceparent"].split("-")[1:3] == [
        headers[propagation.REQUEST_HEADER][:32],
        headers[propagation.REQUEST_HEADER][32:],
    ]


def test_without_other_readers_only_the_request_header_is_sent(request_: request_span.RequestSpan) -> None:
    headers = propagation.inject(request_)
    assert propagation.inject(request_, has_readers=False) == {
        propagation.REQUEST_HEADER: headers[propagation.REQUEST_HEADER]
    }


def test_sequences_share_one_fragment_until_the_last_release(
    request_: request_span.RequestSpan,
) -> None:
    headers = propagation.inject(request_)
    first, second = propagation.join_request(headers), propagation.join_request(headers)
    assert first is second is not None
    propagation.release(first)
    assert propagation._fragments != {}
    propagation.release(first)
    assert propagation._fragments == {}
    again = propagation.join_request(headers)
    assert again is not None and again is not first


@pytest.mark.parametrize("header", ["", "ab", "x" * 48, "é" * 48, "00" * 23])
def test_invalid_header_joins_no_request(recording: Recording, header: str) -> None:
    assert propagation.join_request({propagation.REQUEST_HEADER: header}) is None
    assert propagation.join_request({}) is None
    assert propagation.join_request(None) is None


def test_fragment_without_a_slot_records_nothing(request_: request_span.RequestSpan) -> None:
    fragment = propagation.RequestFragment(0, b"x" * 8, 0)
    fragment.record_event(events.RequestReceived(_clock.now()))
    assert fragment.packed == bytes(4)
