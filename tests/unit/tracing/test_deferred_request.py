"""A deferred request is opened once, is never opened after its exchange, and is not opened by what only watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.work import Work, Worker, attach_work, find_worker
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def open_request() -> RequestSpan | None:
    return start.open_request("a", owner="test", operation="inference")


def test_an_end_waits_for_an_opening_in_another_thread(recording: Recording) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def open_slowly() -> RequestSpan | None:
        began.set()
        goes_on.wait(5)
        return open_request()

    deferred = DeferredRequest(open_slowly)
    opening = threading.Thread(target=deferred.open)
    ending = threading.Thread(target=deferred.discard)
    opening.start()
    assert began.wait(5)
    ending.start()
    time.sleep(0.02)
    assert ending.is_alive()
    goes_on.set()
    opening.join()
    ending.join()
    assert deferred.opened is not None


def test_a_discarded_request_is_not_opened(recording: Recording) -> None:
    deferred = DeferredRequest(open_request)
    deferred.discard()
    assert deferred.open() is None and deferred.ended


def test_events_before_the_opening_are_recorded(recording: Recording) -> None:
    arrived_at = _clock.now()
    deferred = DeferredRequest(
        lambda: start.open_request("a", owner="test", operation="inference", arrived_at=arrived_at)
    )
    deferred.record_event(events.StageEnded(_clock.now(), arrived_at + 1, events.POOL_WAIT, 4))
    request = deferred.open()
    assert request is not None
    request.close()
    (record,) = recording.records()
    assert [stage.name for stage in record.stages] == ["pool wait"]


def test_a_child_process_does_not_open_it(recording: Recording) -> None:
    deferred = DeferredRequest(open_request)
    with deferred._lock:
        held = threading.Thread(target=deferred.discard_after_fork)
        held.start()
        held.join(5)
        assert not held.is_alive()
    assert deferred.open() is None


def test_only_a_model_call_opens_the_request_of_a_worker(recording: Recording) -> None:
    deferred, work = DeferredRequest(open_request), Work(Worker(find_worker()))
    work.take(deferred)
    token = deferred.attach()
    attach_work(work)
    assert start.find_request() is deferred and deferred.opened is None
    assert start.begin_model_call() is deferred.opened is not None
    detach(token)
