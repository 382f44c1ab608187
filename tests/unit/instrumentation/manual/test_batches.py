"""`otel_infer.item` and `otel_infer.batch`: a batch that no hook sees."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import otel_infer
from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan
from tests.support.rings import Recording, stages_of

WAIT_S = 0.02


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def put(name: str) -> tuple[RequestSpan, otel_infer.item]:  # type: ignore[valid-type]
    """Returns a request, and what its handler stores beside its item."""
    request = start.open_request(name, owner="test")
    assert request is not None
    token = request.attach()
    stored = otel_infer.item()
    detach(token)
    return request, stored


def call_model() -> None:
    request = start.begin_model_call()
    if request is not None:
        request.set_operation("inference", "torch", "scorer")
        request.record_stage(events.FORWARD, time.monotonic_ns(), 2)


def wait_of(record: RequestRecord) -> float:
    (wait,) = [stage for stage in record.stages if stage.name == semconv.SPAN_QUEUE_WAIT]
    return (wait.ended_at - wait.started_at) / 1e9


def test_a_call_in_a_batch_is_a_stage_of_each_request(recording: Recording) -> None:
    pairs = [put("first"), put("second")]
    time.sleep(WAIT_S)
    with otel_infer.batch(stored for _, stored in pairs):
        call_model()
    assert start.current_request() is None
    for request, _ in pairs:
        request.close()
    first, second = recording.records()
    assert stages_of(first) == stages_of(second) == ["ingress", "queue wait", "forward"]
    assert min(wait_of(first), wait_of(second)) >= WAIT_S
    assert [link.span_id for link in first.links] == [second.span_id]
    assert [link.span_id for link in second.links] == [first.span_id]


def test_a_batch_of_one_has_no_links(recording: Recording) -> None:
    request, stored = put("only")
    with otel_infer.batch([stored]):
        call_model()
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue wait", "forward"] and not record.links


def test_items_of_ended_requests_and_of_none_are_left_out(recording: Recording) -> None:
    ended, stored = put("ended")
    ended.close()
    with otel_infer.batch([stored, otel_infer.item()]):
        assert start.current_request() is None
    with otel_infer.batch(["no item"]):  # type: ignore[list-item]
        assert start.current_request() is None


def test_an_exception_leaves_a_batch_unchanged(recording: Recording) -> None:
    request, stored = put("only")
    with pytest.raises(ValueError, match="bad rows"), otel_infer.batch([stored]):
        raise ValueError("bad rows")
    assert start.current_request() is None
    request.close()


def test_items_that_raise_do_not_reach_the_worker(recording: Recording) -> None:
    def raise_at_once() -> Iterator[otel_infer.item]:  # type: ignore[valid-type]
        raise RuntimeError
        yield

    with otel_infer.batch(raise_at_once()):
        call_model()
