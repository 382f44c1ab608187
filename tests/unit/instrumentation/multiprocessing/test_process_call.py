"""A function of a job that is called in another process belongs to the request that submitted it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool

import pytest
from opentelemetry import trace

from otel_infer import semconv
from otel_infer.instrumentation.multiprocessing import instrumentor
from otel_infer.instrumentation.multiprocessing.process_call import make_process_call
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.batch_request import BatchRequest
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan
from tests.support.rings import Recording, stages_of

WAIT_S = 0.02


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def open_request(name: str = "POST /") -> RequestSpan:
    request = start.open_request(name, owner="test")
    assert request is not None
    return request


def score(rows: int) -> int:
    """Does what a hook on a model does."""
    request = start.begin_model_call()
    if request is not None:
        request.set_operation("inference", "torch", "scorer")
        request.record_stage(events.FORWARD, time.monotonic_ns(), rows)
    return rows * 2


def fail(message: str) -> None:
    raise ValueError(message)


def send_to_process(call: object) -> object:
    """Returns what a worker's process gets."""
    return pickle.loads(pickle.dumps(call))


def test_stages_of_the_call_belong_to_the_request(recording: Recording) -> None:
    request = open_request()
    call = send_to_process(make_process_call(score, request, 2))
    time.sleep(WAIT_S)
    assert call(3) == 6  # type: ignore[operator]
    assert start.current_request() is None
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward"]
    (wait,) = [stage for stage in record.stages if stage.name == semconv.SPAN_POOL_WAIT]
    assert wait.ended_at - wait.started_at >= WAIT_S * 1e9
    assert (record.operation, record.model) == ("inference", "scorer")
    assert recording.in_flight == 0


def test_call_for_a_batch_is_a_stage_of_each_request(recording: Recording) -> None:
    members = [open_request("first"), open_request("second")]
    call = send_to_process(make_process_call(score, BatchRequest(members), 2))
    assert call(2) == 4  # type: ignore[operator]
    for member in members:
        member.close()
    records = recording.records()
    assert [stages_of(record) for record in records] == [["ingress", "forward"], ["ingress", "forward"]]


def test_spans_of_the_call_are_children_of_the_request(recording: Recording) -> None:
    request = open_request()
    call = send_to_process(make_process_call(read_parent, request, 1))
    assert call() == request.get_span_context().span_id  # type: ignore[operator]
    request.close()


def read_parent() -> int:
    return trace.get_current_span().get_span_context().span_id


def test_exception_of_the_call_reaches_the_caller(recording: Recording) -> None:
    request = open_request()
    call = send_to_process(make_process_call(fail, request, 1))
    with pytest.raises(ValueError, match="no rows"):
        call("no rows")  # type: ignore[operator]
    assert start.current_request() is None
    request.close()
    assert recording.in_flight == 0


def test_call_in_a_process_that_records_nothing_returns_the_result(recording: Recording) -> None:
    request = open_request()
    call = send_to_process(make_process_call(score, request, 1))
    request.close()
    recording.stop()
    assert call(1) == 2  # type: ignore[operator]


def test_job_of_a_thread_pool_of_multiprocessing_is_the_request_s_own(recording: Recording) -> None:
    instrumentor.install()
    try:
        with ThreadPool(1) as pool:
            request = open_request()
            token = request.attach()
            assert pool.apply(score, (1,)) == 2
            assert pool.map(score, [1, 2]) == [2, 4]
            detach(token)
            request.close()
    finally:
        instrumentor.remove()
    (record,) = recording.records()
    assert [stage for stage in stages_of(record) if stage == "forward"] == ["forward"] * 3
