"""Items in multiprocessing's queues: unchanged, with the request that has put them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import queue
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.instrumentation.multiprocessing import instrumentor, managers, queues
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan
from tests.support.rings import Recording, record_with, stages_of

OTHER_PID = 1
WAIT_S = 0.02


@pytest.fixture
def recording() -> Iterator[Recording]:
    multiprocessing.get_context("fork").Queue()  # imports the module of queues
    importlib.import_module("multiprocessing.managers")
    with record_with(instrumentor) as recording:
        yield recording
    queues._noted.clear()


def open_request(name: str = "POST /") -> RequestSpan:
    request = start.open_request(name, owner="test")
    assert request is not None
    return request


def put(items: Any, item: object, request: RequestSpan | None = None) -> None:
    token = request.attach() if request is not None else None
    items.put(item)
    if token is not None:
        detach(token)


def pickle_of(item: object, request: RequestSpan, pid: int = OTHER_PID) -> bytes:
    """Returns the pickle of an item that a request of another process has put."""
    trailer = queues.Trailer(pid, time.monotonic_ns(), queues.list_headers(request))
    return pickle.dumps(item) + trailer.pack()


def count_open() -> int:
    """Returns the requests and parts of requests that are open in this process."""
    assert recorder.requests is not None
    return recorder.requests.in_flight


def call_model() -> None:
    request = start.begin_model_call()
    if request is not None:
        request.set_operation("inference", "torch", "scorer")
        request.record_stage(events.FORWARD, time.monotonic_ns(), 1)


def test_items_of_a_request_are_taken_as_they_were_put(recording: Recording) -> None:
    context = multiprocessing.get_context("fork")
    for items in (context.Queue(), context.JoinableQueue(), context.SimpleQueue()):
        request = open_request()
        for item in ({"rows": [1, 2]}, "text", 3, None):
            put(items, item, request)
        assert [items.get() for _ in range(4)] == [{"rows": [1, 2]}, "text", 3, None]
        request.close()
    assert not queues._noted


def test_pickle_of_an_item_is_followed_by_its_request(recording: Recording) -> None:
    item, request = {"rows": [1, 2]}, open_request()
    queues._noted[id(item)] = [queues.Trailer(OTHER_PID, 5, queues.list_headers(request))]
    data = bytes(ForkingPickler.dumps(item))
    assert data.startswith(bytes(ForkingPickler.dumps(item)))
    assert pickle.loads(data) == item
    trailer = queues.parse_trailer(data)
    assert (trailer.pid, trailer.put_at, len(trailer.headers)) == (OTHER_PID, 5, 1)
    request.close()


def test_item_that_does_not_fit_leaves_no_note(recording: Recording) -> None:
    items = multiprocessing.get_context("fork").Queue(1)
    request = open_request()
    put(items, "first", request)
    token = request.attach()
    with pytest.raises(queue.Full):
        items.put("second", timeout=0.01)
    detach(token)
    assert items.get(timeout=5) == "first"
    assert not queues._noted
    request.close()


def test_worker_works_for_the_request_of_an_item(recording: Recording) -> None:
    request = open_request()
    data = pickle_of("item", request)
    time.sleep(WAIT_S)
    assert ForkingPickler.loads(data) == "item"
    call_model()
    items = multiprocessing.get_context("fork").Queue()
    with pytest.raises(queue.Empty):
        items.get(timeout=0.001)  # the worker is done with the item
    assert count_open() == 1
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue wait", "forward"]
    (wait,) = [stage for stage in record.stages if stage.name == semconv.SPAN_QUEUE_WAIT]
    assert wait.ended_at - wait.started_at >= WAIT_S * 1e9
    assert count_open() == 0


def test_items_that_are_taken_before_one_call_are_a_batch(recording: Recording) -> None:
    requests = [open_request("first"), open_request("second")]
    for request in requests:
        ForkingPickler.loads(pickle_of("item", request))
        time.sleep(WAIT_S)
    call_model()
    for request in requests:
        request.close()
    first, second = recording.records()
    assert stages_of(first) == ["ingress", "queue wait", "batch wait", "forward"]
    assert stages_of(second) == ["ingress", "queue wait", "forward"]


def test_result_of_a_worker_is_not_followed(recording: Recording) -> None:
    request = open_request()
    ForkingPickler.loads(pickle_of("item", request))
    call_model()
    results = multiprocessing.get_context("fork").Queue()
    results.put("part of a stream")
    assert count_open() == 2 and not queues._noted
    assert results.get(timeout=5) == "part of a stream"
    assert count_open() == 1
    request.close()


def test_item_that_comes_back_to_its_process_makes_no_worker(recording: Recording) -> None:
    request = open_request()
    assert ForkingPickler.loads(pickle_of("item", request, os.getpid())) == "item"
    assert start.find_request() is None
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == []


def test_items_without_a_request_have_no_trailer(recording: Recording) -> None:
    items = multiprocessing.get_context("fork").Queue()
    put(items, "item")
    assert not queues._noted and items.get(timeout=5) == "item"


def test_item_of_a_manager_s_queue_unwraps_itself_where_it_is_taken(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = open_request()
    trailer = queues.Trailer(OTHER_PID, time.monotonic_ns(), queues.list_headers(request))
    data = pickle.dumps(("#RETURN", managers.CarriedItem({"rows": 1}, tuple(trailer))))
    monkeypatch.setattr(managers, "_is_manager", lambda: True)
    kept = pickle.loads(data)[1]
    assert isinstance(kept, managers.CarriedItem) and count_open() == 1
    monkeypatch.undo()
    assert pickle.loads(pickle.dumps(kept)) == {"rows": 1}
    assert count_open() == 2
    request.close()


def test_items_pass_a_real_manager_unchanged(recording: Recording) -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        items = manager.Queue()
        request = open_request()
        put(items, {"rows": [1, 2]}, request)
        put(items, "no request")
        assert [items.get(), items.get(timeout=5)] == [{"rows": [1, 2]}, "no request"]
        with pytest.raises(queue.Empty):
            items.get(timeout=0.01)
        request.close()
