"""A started thread inherits the current request; a pool thread inherits the request of each job."""

from __future__ import annotations

import contextvars
import decimal
import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import anyio
import anyio.to_thread
import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.trace import NonRecordingSpan, SpanContext

from otel_infer.assembly.records.request import UserLink
from otel_infer.instrumentation.threading import instrumentor
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    instrumentor.install()
    recording = Recording()
    yield recording
    recording.stop()
    instrumentor.remove()


class _InRequest:
    """Opens a request and makes it current."""

    def __enter__(self) -> request_span.RequestSpan:
        request = start.open_request("POST", owner="test")
        assert request is not None
        self._request, self._token = request, request.attach()
        return request

    def __exit__(self, *_: object) -> None:
        detach(self._token)


def test_thread_inherits_the_request_it_was_started_in(recording: Recording) -> None:
    seen: list[request_span.RequestSpan | None] = []
    with _InRequest() as request:
        thread = threading.Thread(target=lambda: seen.append(start.current_request()))
        thread.start()
        thread.join()
    assert seen == [request]


class _Restarting(threading.Thread):
    """Calls its own `run` again until the third turn."""

    turns = 0

    def run(self) -> None:
        self.turns += 1
        if self.turns < 3:
            self.run()


@pytest.mark.parametrize("has_own", [False, True])
def test_thread_started_in_a_request_may_rerun_itself(recording: Recording, has_own: bool) -> None:
    thread = _Restarting()
    if has_own:
        thread.run = thread.run  # type: ignore[method-assign]
    run = thread.run
    with _InRequest():
        thread.start()
        thread.join()
    assert thread.turns == 3
    assert thread.run == run and ("run" in vars(thread)) == has_own


def test_finished_thread_is_freed_without_garbage_collection(recording: Recording) -> None:
    thread = threading.Thread(target=int)
    gone = weakref.ref(thread)
    gc.disable()
    try:
        with _InRequest():
            thread.start()
            thread.join()
        del thread
        assert gone() is None
    finally:
        gc.enable()


def test_thread_outliving_its_request_starts_linked_traces(recording: Recording) -> None:
    jobs: queue.Queue[str] = queue.Queue()

    def work() -> None:
        while name := jobs.get(timeout=10):
            job = start.open_request(name, owner="test")
            assert job is not None
            job.set_attribute("user", str(baggage.get_baggage("user", job.around)))
            job.close()
            jobs.task_done()

    worker = threading.Thread(target=work)
    with _InRequest() as request:
        inner = otel_context.attach(baggage.set_baggage("user", "alice"))
        worker.start()
        otel_context.detach(inner)
        jobs.put("while it lasts")
        jobs.join()
    request.close()
    for name in ("afterwards", "later", ""):
        jobs.put(name)
    worker.join()
    below, first, *others = recording.records()
    assert below.parent_span_id == first.span_id and below.attributes["user"] == "alice"
    assert [other.name for other in others] == ["afterwards", "later"]
    for other in others:
        assert other.parent_span_id == b"" and other.trace_id != first.trace_id
        assert other.links == [UserLink(first.trace_id, first.span_id, {})]
        assert other.attributes["user"] == "None"


def test_span_started_by_the_thread_stays_parent(recording: Recording) -> None:
    """The thread has outlived its request and starts a span of another tracer."""
    over, found = threading.Event(), list[request_span.RequestSpan | None]()
    above = NonRecordingSpan(SpanContext(1, 2, is_remote=False))

    def work() -> None:
        over.wait(10)
        with trace.use_span(above):
            found.append(start.open_request("job", owner="test"))

    worker = threading.Thread(target=work)
    with _InRequest() as request:
        worker.start()
    request.close()
    over.set()
    worker.join()
    (job,) = found
    assert job is not None and job.get_span_context().trace_id == 1


def test_pool_job_inherits_the_submitting_request(
    recording: Recording,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with _InRequest() as first:
            assert pool.submit(start.current_request).result() is first
        assert pool.submit(start.current_request).result() is None
        with _InRequest() as second:
            assert pool.submit(start.current_request).result() is second
        assert pool.submit(start.current_request).result() is None


def test_anyio_job_inherits_the_request_only_while_running(recording: Recording) -> None:
    async def jobs() -> tuple[object, object, object]:
        with _InRequest() as request:
            own = await anyio.to_thread.run_sync(start.current_request)
        return request, own, await anyio.to_thread.run_sync(start.current_request)

    request, own, after = anyio.run(jobs)
    assert own is request
    assert after is None


def test_interpreter_pool_jobs_are_not_wrapped(recording: Recording) -> None:
    """Jobs of an interpreter pool are pickled, so they must not be wrapped."""

    class Pool(ThreadPoolExecutor):
        pass

    Pool.__module__ = "concurrent.futures.interpreter"
    with Pool(1) as pool, _InRequest():
        assert pool.submit(start.current_request).result() is None


# ── other context variables are not propagated ───────────────────────────────────────────────────────────────────

library_variable: contextvars.ContextVar[str] = contextvars.ContextVar(
    "library_variable", default="a thread's own"
)


def test_other_context_variables_stay_with_their_thread(recording: Recording) -> None:
    """A thread and a pool job keep the context of their thread, as without instrumentation."""
    seen: list[str] = []
    with (
        ThreadPoolExecutor(1, initializer=library_variable.set, initargs=("the pool's",)) as pool,
        _InRequest() as request,
    ):
        library_variable.set("the request's")
        assert pool.submit(lambda: (start.current_request(), library_variable.get())).result() == (
            request,
            "the pool's",
        )
        thread = threading.Thread(target=lambda: seen.append(library_variable.get()))
        thread.start()
        thread.join()
    assert seen == ["a thread's own"]


def test_decimal_precision_of_a_job_stays_local(recording: Recording) -> None:
    def divide_with_low_precision() -> str:
        decimal.getcontext().prec = 3
        return str(decimal.Decimal(1) / 3)

    with ThreadPoolExecutor(1) as pool, _InRequest():
        before = decimal.getcontext().prec
        assert pool.submit(divide_with_low_precision).result() == "0.333"
        assert decimal.getcontext().prec == before > 3


def test_event_loop_in_a_pool_thread_can_start(recording: Recording) -> None:
    """`sniffio` stores the running loop in a context variable."""

    async def elsewhere() -> object:
        return start.current_request()

    async def handler() -> tuple[object, object]:
        with _InRequest() as request, ThreadPoolExecutor(1) as pool:
            return request, pool.submit(anyio.run, elsewhere).result()

    request, found = anyio.run(handler)
    assert found is request


def test_thread_started_by_a_job_inherits_its_request(recording: Recording) -> None:
    seen: list[request_span.RequestSpan | None] = []

    def job() -> None:
        thread = threading.Thread(target=lambda: seen.append(start.current_request()))
        thread.start()
        thread.join()

    with ThreadPoolExecutor(1) as pool, _InRequest() as request:
        pool.submit(job).result()
    assert seen == [request]


def test_thread_outliving_its_request_stops_propagating_it(recording: Recording) -> None:
    """Calls made after the request has ended start a new trace."""
    over, headers = threading.Event(), list[dict[str, str]]()

    def work() -> None:
        for _ in range(2):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            headers.append(carrier)
            over.wait(10)

    worker = threading.Thread(target=work)
    with _InRequest() as request:
        worker.start()
        while not headers:
            time.sleep(0.001)
    request.close()
    over.set()
    worker.join()
    assert [carrier.keys() for carrier in headers] == [{"traceparent"}, set()]


def test_multiprocessing_pool_jobs_do_not_inherit_the_creator(recording: Recording) -> None:
    with _InRequest() as first:
        pool = ThreadPool(1)
    with pool, _InRequest() as second:
        assert pool.apply(start.current_request) in (None, second)
        assert not first.ended
