"""What a request takes along into another process, and what it is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_infer import clock, elsewhere, facts, ingress
from tests.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()
    elsewhere._parts.clear()


@pytest.fixture
def request_(recording: Recording) -> ingress.LiveRequest:
    request = ingress.open_request("POST /", owner="test")
    assert request is not None
    return request


def test_what_is_stated_of_a_part_is_stated_of_its_request(
    recording: Recording, request_: ingress.LiveRequest
) -> None:
    part = elsewhere.part(elsewhere.headers(request_))
    assert part is not None
    part.state(facts.EngineFinished(clock.now(), "stop", 3))
    elsewhere.left(part)
    request_.close()
    (record,) = recording.records()
    assert (record.finish_reasons, record.output_tokens) == (("stop",), 3)
    assert recording.in_flight == 0


def test_others_read_the_standard_headers_beside_it(request_: ingress.LiveRequest) -> None:
    said = elsewhere.headers(request_)
    assert said["traceparent"].split("-")[1:3] == [said[elsewhere.MARK][:32], said[elsewhere.MARK][32:]]


def test_sequences_of_a_request_are_one_part_until_the_last_has_left(request_: ingress.LiveRequest) -> None:
    said = elsewhere.headers(request_)
    one, other = elsewhere.part(said), elsewhere.part(said)
    assert one is other is not None
    elsewhere.left(one)
    assert elsewhere._parts != {}
    elsewhere.left(one)
    assert elsewhere._parts == {}
    again = elsewhere.part(said)
    assert again is not None and again is not one


@pytest.mark.parametrize("mark", ["", "ab", "x" * 48, "é" * 48, "00" * 23])
def test_what_is_no_mark_of_ours_is_nobodys(recording: Recording, mark: str) -> None:
    assert elsewhere.part({elsewhere.MARK: mark}) is None
    assert elsewhere.part({}) is None
    assert elsewhere.part(None) is None


def test_a_part_that_found_no_room_says_nothing(request_: ingress.LiveRequest) -> None:
    nobody = elsewhere.Part(0, b"x" * 8, 0)
    nobody.state(facts.RequestReceived(clock.now()))
    assert nobody.packed == bytes(4)
