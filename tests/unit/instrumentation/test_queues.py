"""Items of requests in the application's queues: the wait, the worker's work, batches, and queues that are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import logging.handlers
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from opentelemetry import trace

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation import batch_windows, queues
from otel_infer.instrumentation import threading as thread_hooks
from otel_infer.instrumentation.queue_states import LeftAlone, find_state, leave_alone, states
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.work import take_over
from tests.support.rings import Recording, record_with, stages_of

WAIT_S = 0.03
MS = 1_000_000


@pytest.fixture
def recording() -> Iterator[Recording]:
    with record_with(thread_hooks.instrumentor, queues.instrumentor, batch_windows.instrumentor) as recording:
        yield recording


def call_model() -> list[str]:
    """Does what a hook on a model does. Returns the names of the requests that it is called for."""
    started_at = time.monotonic_ns()
    request = start.begin_model_call()
    if request is None:
        return []
    time.sleep(0.002)
    request.set_operation("inference", "torch", "scorer")
    request.is_named = True
    request.record_stage(events.FORWARD, started_at, 1)
    return [member.arrived_name for member in getattr(request, "members", (request,))]  # type: ignore[attr-defined]


def open_request(name: str) -> RequestSpan:
    request = start.open_request(name, owner="test", operation="inference")
    assert request is not None
    request.arrived_name = name  # type: ignore[attr-defined]
    return request


def put_for(name: str, work: Any) -> RequestSpan:
    """Puts an item as a new request, which is not current afterwards."""
    request = open_request(name)
    token = request.attach()
    work.put("item")
    detach(token)
    return request


async def handle(name: str, work: asyncio.Queue[Any]) -> Any:
    """A handler: puts its item and a future into the queue, and waits for the result."""
    request = open_request(name)
    request.attach()
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    await work.put((name, future))
    result = await future
    request.close()
    return result


def by_name(recording: Recording) -> dict[str, RequestRecord]:
    return {record.name: record for record in recording.records()}


def length_of(record: RequestRecord, name: str) -> float:
    (stage,) = [stage for stage in record.stages if stage.name == name]
    return (stage.ended_at - stage.started_at) / MS


async def run_async(
    worker: Callable[[asyncio.Queue[Any]], Any], names: str, pause_s: float = 0.0
) -> list[Any]:
    """Runs a worker and one handler per name, one after the other begun. Returns the handlers' results."""
    work: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(worker(work))
    handlers = []
    for name in names:
        handlers.append(asyncio.create_task(handle(name, work)))
        await asyncio.sleep(pause_s)
    results = await asyncio.gather(*handlers)
    task.cancel()
    return results


async def work_one_by_one(work: asyncio.Queue[Any]) -> None:
    while True:
        _, future = await work.get()
        await asyncio.sleep(WAIT_S)
        future.set_result(call_model())


def test_what_a_worker_does_belongs_to_the_request_whose_item_it_took(recording: Recording) -> None:
    assert asyncio.run(run_async(work_one_by_one, "abc")) == [["a"], ["b"], ["c"]]
    records = by_name(recording)
    assert [stages_of(records[name])[:1] for name in "abc"] == [["queue wait"]] * 3
    assert "forward" in stages_of(records["c"])
    assert length_of(records["c"], "queue wait") > length_of(records["a"], "queue wait") + 0.8e3 * WAIT_S


async def fill_by_wait_for(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    until = time.monotonic() + WAIT_S
    while (left := until - time.monotonic()) > 0:
        try:
            batch.append(await asyncio.wait_for(work.get(), left))
        except TimeoutError:
            break


async def fill_by_timeout(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while True:
                batch.append(await work.get())


async def fill_by_timer(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    timer = asyncio.ensure_future(asyncio.sleep(WAIT_S))
    while not timer.done():
        getter = asyncio.ensure_future(work.get())
        await asyncio.wait({getter, timer}, return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            batch.append(getter.result())
        else:
            getter.cancel()


async def fill_by_wait(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    until = time.monotonic() + WAIT_S
    while (left := until - time.monotonic()) > 0:
        getter = asyncio.ensure_future(work.get())
        done, _ = await asyncio.wait([getter], timeout=left)
        if not done:
            getter.cancel()
            break
        batch.append(getter.result())


async def fill_by_sleep(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if work.empty():
            await asyncio.sleep(0.002)
        else:
            batch.append(work.get_nowait())


async def fill_after_sleep(batch: list[Any], work: asyncio.Queue[Any]) -> None:
    await asyncio.sleep(WAIT_S)
    while not work.empty():
        batch.append(work.get_nowait())


FILLS = [fill_by_wait_for, fill_by_timeout, fill_by_timer, fill_by_wait, fill_by_sleep, fill_after_sleep]


def work_in_batches(fill: Any) -> Any:
    """The usual batcher: the first item, then more until a window has passed."""

    async def work_in_batches(work: asyncio.Queue[Any]) -> None:
        while True:
            batch = [await work.get()]
            await fill(batch, work)
            names = call_model()
            for _, future in batch:
                future.set_result(names)

    return work_in_batches


@pytest.mark.parametrize("fill", FILLS[:-1])
def test_items_taken_before_one_call_are_a_batch(recording: Recording, fill: Any) -> None:
    results = asyncio.run(run_async(work_in_batches(fill), "abc", pause_s=0.005))
    assert results == [["a", "b", "c"]] * 3
    records = by_name(recording)
    for name in "abc":
        assert stages_of(records[name]) == ["queue wait", "batch wait", "forward"]
        (wait,) = [stage for stage in records[name].stages if stage.name == "batch wait"]
        assert wait.attributes == {"infer.items": 3}
    waits = [length_of(records[name], "queue wait") + length_of(records[name], "batch wait") for name in "ac"]
    assert waits[0] > waits[1] + 5
    linked = {name: {link.span_id for link in records[name].links} for name in "abc"}
    assert linked["a"] == {records["b"].span_id, records["c"].span_id}
    assert linked["b"] == linked["c"] == {records["a"].span_id}


async def handle_several(name: str, work: asyncio.Queue[Any], items: int) -> list[Any]:
    """A handler of a request with several texts: each is an item."""
    request = open_request(name)
    request.attach()
    futures = []
    for _ in range(items):
        futures.append(asyncio.get_running_loop().create_future())
        await work.put((name, futures[-1]))
    results = await asyncio.gather(*futures)
    request.close()
    return results


def test_a_request_may_put_several_items(recording: Recording) -> None:
    """Its items are no results, also where the worker takes more of them after it has called the model."""

    async def work_on_pairs(work: asyncio.Queue[Any]) -> None:
        while True:
            batch = [await work.get(), await work.get()]
            names = call_model()
            await asyncio.sleep(0)
            for _, future in batch:
                future.set_result(names)

    async def serve() -> list[Any]:
        work: asyncio.Queue[Any] = asyncio.Queue()
        handlers = [asyncio.create_task(handle_several(name, work, 3)) for name in "abcd"]
        await asyncio.sleep(0)
        worker = asyncio.create_task(work_on_pairs(work))
        results = await asyncio.gather(*handlers)
        worker.cancel()
        return results

    a, ab, b = ["a"], ["a", "b"], ["b"]
    c, cd, d = ["c"], ["c", "d"], ["d"]
    assert asyncio.run(serve()) == [[a, a, ab], [ab, b, b], [c, c, cd], [cd, d, d]]
    records = by_name(recording)
    assert [stages_of(records[name]).count("forward") for name in "abcd"] == [2, 2, 2, 2]
    assert [stages_of(records[name]).count("queue wait") for name in "abcd"] == [2, 2, 2, 2]


@pytest.mark.parametrize("fill", FILLS)
def test_a_single_item_waits_for_others_that_do_not_come(recording: Recording, fill: Any) -> None:
    assert asyncio.run(run_async(work_in_batches(fill), "a")) == [["a"]]
    assert length_of(by_name(recording)["a"], "batch wait") == pytest.approx(WAIT_S * 1e3, abs=8)


def test_all_items_taken_by_wait_for_belong_to_their_requests(recording: Recording) -> None:
    async def worker(work: asyncio.Queue[Any]) -> None:
        while True:
            try:
                _, future = await asyncio.wait_for(work.get(), 0.01)
            except TimeoutError:
                continue
            future.set_result(call_model())

    assert asyncio.run(run_async(worker, "ab", pause_s=0.03)) == [["a"], ["b"]]


def test_a_task_per_item_keeps_its_request(recording: Recording) -> None:
    async def process(future: asyncio.Future[Any]) -> None:
        await asyncio.sleep(WAIT_S)
        future.set_result(call_model())

    async def worker(work: asyncio.Queue[Any]) -> None:
        tasks = []
        while True:
            _, future = await work.get()
            tasks.append(asyncio.create_task(process(future)))

    assert asyncio.run(run_async(worker, "abc", pause_s=0.005)) == [["a"], ["b"], ["c"]]


def test_a_task_that_takes_over_an_item_works_for_it(recording: Recording) -> None:
    async def process(requests: list[RequestSpan], future: asyncio.Future[Any]) -> None:
        requests[0].attach()
        await asyncio.sleep(WAIT_S)
        future.set_result(call_model())

    async def worker(work: asyncio.Queue[Any]) -> None:
        tasks = []
        while True:
            _, future = await work.get()
            tasks.append(asyncio.create_task(process(take_over(), future)))
            assert take_over() == [] and start.begin_model_call() is None

    assert asyncio.run(run_async(worker, "abc")) == [["a"], ["b"], ["c"]]


def test_a_queue_left_alone_gives_a_worker_nothing(recording: Recording) -> None:
    async def worker(work: asyncio.Queue[Any]) -> None:
        leave_alone(work)
        await work_one_by_one(work)

    assert asyncio.run(run_async(worker, "ab", pause_s=0.01)) == [[], []]
    assert stages_of(by_name(recording)["b"]) == []


class Threaded:
    """A thread that takes items from a `queue.Queue`, and a thread per request that puts one."""

    def __init__(self, work: Any, take: Callable[[Any], list[Any]]) -> None:
        self.work, self.take = work, take
        self.results: dict[str, Any] = {}

    def serve(self) -> None:
        while True:
            batch = self.take(self.work)
            if batch[-1] is None:
                return
            names = call_model()
            for name, done in batch:
                self.results[name] = names
                done.set()

    def handle(self, name: str) -> None:
        request = open_request(name)
        request.attach()
        done = threading.Event()
        self.work.put((name, done))
        assert done.wait(5)
        request.close()

    def run(self, names: str, pause_s: float = 0.0) -> dict[str, Any]:
        server = threading.Thread(target=self.serve)
        server.start()
        handlers = [threading.Thread(target=self.handle, args=name) for name in names]
        for handler in handlers:
            handler.start()
            time.sleep(pause_s)
        for handler in handlers:
            handler.join()
        self.work.put(None)
        server.join()
        return self.results


def take_one(work: Any) -> list[Any]:
    return [work.get()]


def take_until_empty(work: Any) -> list[Any]:
    batch = [work.get()]
    while batch[-1] is not None:
        try:
            batch.append(work.get(timeout=WAIT_S))
        except queue.Empty:
            break
    return batch


@pytest.mark.parametrize("kind", [queue.Queue, queue.LifoQueue])
def test_a_thread_works_for_the_request_whose_item_it_took(recording: Recording, kind: Any) -> None:
    assert Threaded(kind(), take_one).run("abc", pause_s=0.01) == {"a": ["a"], "b": ["b"], "c": ["c"]}
    records = by_name(recording)
    assert [stages_of(records[name]) for name in "abc"] == [["queue wait", "forward"]] * 3


def test_a_thread_calls_a_model_for_a_batch(recording: Recording) -> None:
    results = Threaded(queue.Queue(), take_until_empty).run("abc", pause_s=0.005)
    assert results == {name: ["a", "b", "c"] for name in "abc"}


def test_an_item_stays_the_object_that_it_is(recording: Recording) -> None:
    work: queue.Queue[Any] = queue.Queue()
    item = object()
    request = open_request("a")
    request.attach()
    work.put(item)
    assert work.qsize() == 1 and list(work.queue) == [item]
    assert work.get() is item


def test_a_queue_of_results_is_left_alone(recording: Recording) -> None:
    """A streamer: a thread of the request puts tokens, and the request takes them."""
    request = open_request("a")
    request.attach()
    tokens: queue.Queue[Any] = queue.Queue()

    def generate() -> None:
        call_model()
        for token in range(5):
            tokens.put(token)

    thread = threading.Thread(target=generate)
    thread.start()
    assert [tokens.get() for _ in range(5)] == list(range(5))
    thread.join()
    assert start.current_request() is request
    assert find_state(tokens).entries == {}  # type: ignore[union-attr]
    request.close()
    assert stages_of(by_name(recording)["a"]) == ["forward"]


def test_a_pool_of_connections_lends_no_request(recording: Recording) -> None:
    pool: queue.Queue[Any] = queue.Queue()
    put_for("other", pool)
    request = open_request("a")
    request.attach()
    assert pool.get() == "item"
    assert start.current_request() is request


def test_an_item_of_no_request_frees_the_worker(recording: Recording) -> None:
    work: queue.Queue[Any] = queue.Queue()
    request = put_for("a", work)
    assert work.get() == "item"
    assert start.current_request() is request
    request.close()
    work.put("start-up")
    work.get()
    assert start.current_request() is None


def test_a_worker_that_the_first_request_started_serves_the_others(recording: Recording) -> None:
    work: queue.Queue[Any] = queue.Queue()
    results: dict[str, Any] = {}

    def serve() -> None:
        while (item := work.get()) is not None:
            results[item[0]] = call_model()
            item[1].set()

    def handle(name: str) -> None:
        request = open_request(name)
        request.attach()
        if name == "a":
            threading.Thread(target=serve).start()
        done = threading.Event()
        work.put((name, done))
        assert done.wait(5)
        request.close()

    for name in "abc":
        handler = threading.Thread(target=handle, args=name)
        handler.start()
        handler.join()
    work.put(None)
    assert results == {"a": ["a"], "b": ["b"], "c": ["c"]}


def test_a_call_after_the_end_of_its_request_is_linked_to_it(recording: Recording) -> None:
    """A worker goes on after the response was sent: what it calls then is no part of that request."""
    work: queue.Queue[Any] = queue.Queue()
    request = put_for("a", work)

    def serve() -> None:
        work.get()
        request.close()
        later = open_request("later")
        later.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    records = by_name(recording)
    assert records["later"].trace_id != records["a"].trace_id
    assert [link.span_id for link in records["later"].links] == [records["a"].span_id]


def test_a_span_of_the_application_stays_current_in_a_worker(recording: Recording) -> None:
    work: queue.Queue[Any] = queue.Queue()
    put_for("a", work)
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, False))
    with trace.use_span(span):
        work.get()
        assert trace.get_current_span() is span


def test_a_stream_of_an_unknown_model_is_left_alone(recording: Recording) -> None:
    """The items that a request takes back itself are results from the second one on."""
    request = open_request("a")
    request.attach()
    tokens: queue.Queue[Any] = queue.Queue()
    for number in range(5):
        tokens.put(number)
        assert tokens.get() == number
    request.close()
    assert stages_of(by_name(recording)["a"]) == ["queue wait"]


def test_queues_of_servers_pools_and_log_handlers_are_left_alone(recording: Recording) -> None:
    request = open_request("a")
    request.attach()
    records: queue.Queue[Any] = queue.Queue()
    handler = logging.handlers.QueueHandler(records)
    handler.emit(logging.makeLogRecord({"msg": "hello"}))
    anyio.run(anyio.to_thread.run_sync, lambda: None)  # anyio gives work to its threads by a queue
    thread = threading.Thread(target=records.get)
    thread.start()
    thread.join()
    assert type(find_state(records)) is LeftAlone
    request.close()
    assert stages_of(by_name(recording)["a"]) == []


@pytest.mark.parametrize("module", ["urllib3.connectionpool", "httpcore._sync", "sqlalchemy.pool.impl"])
def test_a_pool_of_connections_of_a_client_is_left_alone(recording: Recording, module: str) -> None:
    """A request that calls two services before its model has waited in no queue."""
    names: dict[str, Any] = {"__name__": module, "pool": queue.LifoQueue()}
    exec("def call_service():\n pool.put(pool.get() if pool.qsize() else object())", names)
    request = open_request("a")
    request.attach()
    for _ in range(3):
        names["call_service"]()
    assert type(find_state(names["pool"])) is LeftAlone
    request.close()
    assert stages_of(by_name(recording)["a"]) == []


def test_a_full_queue_keeps_its_own_exception(recording: Recording) -> None:
    work: queue.Queue[Any] = queue.Queue(1)
    request = open_request("a")
    request.attach()
    work.put(1)
    for _ in range(2):
        with pytest.raises(queue.Full):
            work.put(2, block=False)
    assert len(find_state(work).entries) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("puts", [1, 2])
def test_a_request_that_fails_in_the_queue_has_waited_there(recording: Recording, puts: int) -> None:
    """Its handler gave up: an answer 504. The worker takes the item of another one first, or none."""
    work: queue.Queue[Any] = queue.Queue()
    requests = [put_for(name, work) for name in "ab"[:puts]]
    if puts == 2:
        work.get()
    time.sleep(0.01)
    requests[-1].close(events.ERROR, "timeout")
    requests[0].close()
    records = by_name(recording)
    failed = records["ab"[puts - 1]]
    assert stages_of(failed) == ["queue wait"] and failed.failed_stage == "queue wait"
    assert length_of(failed, "queue wait") >= 10
    assert puts == 1 or stages_of(records["a"]) == ["queue wait"]


def test_an_item_that_waits_on_is_no_wait_of_a_request_that_succeeded(recording: Recording) -> None:
    request = put_for("a", queue.Queue())
    request.close()
    assert stages_of(by_name(recording)["a"]) == []


def test_items_are_followed_in_each_of_many_queues(recording: Recording) -> None:
    """Also after others are freed: queues share slots of the compiled hooks' filter."""
    kept: list[queue.Queue[Any]] = []
    for number in range(1500):
        work: queue.Queue[Any] = queue.Queue()
        put_for("first", work).close()
        if number % 3 == 0:
            kept.append(work)
    del work
    gc.collect()

    recording.records()
    requests = [put_for("second", work) for work in kept]
    for request, work in zip(requests, kept):
        work.get()  # of the first request, which has ended
        work.get()
        request.close()
    assert [stages_of(record) for record in recording.records()] == [["queue wait"]] * len(kept)


def test_a_worker_without_an_item_puts_for_no_request(recording: Recording) -> None:
    """A task that passes items on, such as one of no request, is a worker since its first `get`."""

    async def pass_on(source: asyncio.Queue[Any], target: asyncio.Queue[Any]) -> None:
        while True:
            target.put_nowait(await source.get())

    async def main() -> tuple[Any, Any]:
        source: asyncio.Queue[Any] = asyncio.Queue()
        target: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(pass_on(source, target))
        source.put_nowait("of no request")
        item = await target.get()
        before = find_state(target)
        request = open_request("a")
        request.attach()
        source.put_nowait("of a request")
        await target.get()
        request.close()
        task.cancel()
        return item, before

    assert asyncio.run(main()) == ("of no request", None)
    assert set(stages_of(by_name(recording)["a"])) == {"queue wait"}


def test_a_freed_queue_leaves_no_state(recording: Recording) -> None:
    put_for("a", queue.Queue())
    known = set(states)
    work: queue.Queue[Any] = queue.Queue()
    put_for("b", work)
    assert set(states) - known == {id(work)}
    del work
    gc.collect()
    assert set(states) <= known


@pytest.mark.parametrize("item", ["text", None, 7])
def test_items_pass_unchanged_however_they_are_put_and_taken(recording: Recording, item: Any) -> None:
    work: queue.Queue[Any] = queue.Queue(8)
    request = open_request("a")
    token = request.attach()
    work.put(item)
    work.put(item=item)
    work.put(item, True, timeout=1)
    queue.Queue.put(work, item, block=False)
    work.put_nowait(item)
    detach(token)
    taken = [work.get(), work.get(block=True), work.get(timeout=1), queue.Queue.get(work), work.get_nowait()]
    assert all(each is item for each in taken) and work.empty()
    with pytest.raises(queue.Empty):
        work.get(block=False)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        work.put()  # type: ignore[call-arg]
    assert start.current_request() is request and find_state(work).entries == {}  # type: ignore[union-attr]


def test_each_batch_of_a_worker_has_its_requests_and_their_spans(recording: Recording) -> None:
    """The span of the request that was worked for ends with it; no request is current in a worker that has several."""
    work: queue.Queue[Any] = queue.Queue()
    first, second, third = (put_for(name, work) for name in "abc")
    work.get()
    assert call_model() == ["a"] and trace.get_current_span() is first
    work.get()
    assert trace.get_current_span() is second
    work.get()
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert call_model() == ["b", "c"]
    for request in (first, second, third):
        request.close()
    waits = {name: next(stage.name for stage in record.stages) for name, record in by_name(recording).items()}
    assert waits == dict.fromkeys("abc", events.QUEUE_WAIT)


def test_item_that_a_dispatcher_passes_on_stays_its_request_s(recording: Recording) -> None:
    """A thread takes items, and puts each into the queue of another thread, which calls the model."""
    first: queue.Queue[Any] = queue.Queue()
    second: queue.Queue[Any] = queue.Queue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def dispatch() -> None:
        for _ in range(3):
            second.put(first.get())

    def work() -> None:
        for _ in range(3):
            taken = second.get()
            done.put((taken["name"], call_model()))

    threads = [threading.Thread(target=target) for target in (dispatch, work)]
    for thread in threads:
        thread.start()
    requests = {name: open_request(name) for name in "abc"}
    for name, request in requests.items():
        token = request.attach()
        first.put({"name": name})
        detach(token)
    for thread in threads:
        thread.join(5)
    assert sorted(done.get() for _ in range(3)) == [(name, [name]) for name in "abc"]
    for request in requests.values():
        request.close()


def test_hooked_functions_of_asyncio_are_coroutine_functions(recording: Recording) -> None:
    for function in (asyncio.sleep, asyncio.wait, asyncio.Queue.get):
        assert asyncio.iscoroutinefunction(function)

    async def wait_for_nothing() -> None:
        waiting = asyncio.Queue[int]()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting.get(), 0.01)
        waiting.put_nowait(1)
        assert await waiting.get() == 1
        assert await asyncio.sleep(0, "done") == "done"

    asyncio.run(wait_for_nothing())


def test_an_item_of_the_next_model_has_waited_and_a_result_has_not(recording: Recording) -> None:
    """A detector puts what it found into the queue of a classifier, whose answers a third thread takes."""
    found: queue.Queue[Any] = queue.Queue()
    classified: queue.Queue[Any] = queue.Queue()
    detect: queue.Queue[Any] = queue.Queue()

    def run_detector() -> None:
        for _ in "ab":
            detect.get()
            call_model()
            found.put("box")

    def run_classifier() -> None:
        for _ in "ab":
            found.get()
            time.sleep(WAIT_S)
            call_model()
            classified.put("label")

    def deliver() -> None:
        for _ in "ab":
            classified.get()

    requests = [put_for(name, detect) for name in "ab"]
    threads = [threading.Thread(target=target) for target in (run_detector, run_classifier, deliver)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    for request in requests:
        request.close()
    records = by_name(recording)
    assert [stages_of(records[name]) for name in "ab"] == [["queue wait", "forward"] * 2] * 2
    waits = [stage for stage in records["b"].stages if stage.name == "queue wait"]
    assert (waits[1].ended_at - waits[1].started_at) / MS > 0.8e3 * WAIT_S
