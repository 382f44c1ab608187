"""Threads carry the request along that they were started for; those of pools, the request of each job."""

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
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    instrumentor.install()
    recording = Recording()
    yield recording
    recording.stop()
    instrumentor.remove()


class _InRequest:
    """A request of ours is current here."""

    def __enter__(self) -> request_span.RequestSpan:
        request = start.open_request("POST", owner="test")
        assert request is not None
        self._request, self._token = request, request.attach()
        return request

    def __exit__(self, *_: object) -> None:
        start.detach(self._token)


def test_a_thread_works_for_the_request_that_it_was_started_in(recording: Recording) -> None:
    seen: list[request_span.RequestSpan | None] = []
    with _InRequest() as request:
        thread = threading.Thread(target=lambda: seen.append(start.current_request()))
        thread.start()
        thread.join()
    assert seen == [request]


class _Restarting(threading.Thread):
    """Begins anew where it has failed."""

    turns = 0

    def run(self) -> None:
        self.turns += 1
        if self.turns < 3:
            self.run()


@pytest.mark.parametrize("has_own", [False, True])
def test_a_thread_that_was_started_in_a_request_may_run_itself_again(
    recording: Recording, has_own: bool
) -> None:
    thread = _Restarting()
    if has_own:
        thread.run = thread.run  # type: ignore[method-assign]
    run = thread.run
    with _InRequest():
        thread.start()
        thread.join()
    assert thread.turns == 3
    assert thread.run == run and ("run" in vars(thread)) == has_own


def test_a_thread_that_is_over_is_no_garbage(recording: Recording) -> None:
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


def test_a_thread_that_outlives_the_request_it_was_started_in_works_for_others(recording: Recording) -> None:
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
        inner = otel_context.attach(baggage.set_baggage("user", "somebody"))
        worker.start()
        otel_context.detach(inner)
        jobs.put("while it lasts")
        jobs.join()
    request.close()
    for name in ("afterwards", "later", ""):
        jobs.put(name)
    worker.join()
    below, first, *others = recording.records()
    assert below.parent_span_id == first.span_id and below.attributes["user"] == "somebody"
    assert [other.name for other in others] == ["afterwards", "later"]
    for other in others:
        assert other.parent_span_id == b"" and other.trace_id != first.trace_id
        assert other.links == [UserLink(first.trace_id, first.span_id, {})]
        assert other.attributes["user"] == "None"


def test_what_a_thread_begins_itself_is_not_cut_off(recording: Recording) -> None:
    """A span of another tracer's, in a thread that has outlived the request it was started in."""
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


def test_a_job_of_a_pool_works_for_the_request_that_it_comes_from_whoever_started_the_thread(
    recording: Recording,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with _InRequest() as first:
            assert pool.submit(start.current_request).result() is first
        assert pool.submit(start.current_request).result() is None
        with _InRequest() as second:
            assert pool.submit(start.current_request).result() is second
        assert pool.submit(start.current_request).result() is None


def test_so_does_a_job_of_anyios_and_its_thread_keeps_nobody_alive(recording: Recording) -> None:
    async def jobs() -> tuple[object, object, object]:
        with _InRequest() as request:
            own = await anyio.to_thread.run_sync(start.current_request)
        return request, own, await anyio.to_thread.run_sync(start.current_request)

    request, own, after = anyio.run(jobs)
    assert own is request
    assert after is None


def test_a_pool_of_other_interpreters_gets_its_jobs_as_they_are(recording: Recording) -> None:
    """They are pickled on their way."""

    class Pool(ThreadPoolExecutor):
        pass

    Pool.__module__ = "concurrent.futures.interpreter"
    with Pool(1) as pool, _InRequest():
        assert pool.submit(start.current_request).result() is None


# ── nothing of anybody else's goes along ─────────────────────────────────────────────────────────────────────────

theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="a thread's own")


def test_what_other_libraries_keep_in_their_context_stays_with_its_thread(recording: Recording) -> None:
    """As without us: a thread, and a job of a pool, has the context of its thread."""
    seen: list[str] = []
    with (
        ThreadPoolExecutor(1, initializer=theirs.set, initargs=("the pool's",)) as pool,
        _InRequest() as request,
    ):
        theirs.set("the request's")
        assert pool.submit(lambda: (start.current_request(), theirs.get())).result() == (
            request,
            "the pool's",
        )
        thread = threading.Thread(target=lambda: seen.append(theirs.get()))
        thread.start()
        thread.join()
    assert seen == ["a thread's own"]


def test_a_job_that_sets_the_precision_of_its_numbers_sets_nobody_elses(recording: Recording) -> None:
    def coarse() -> str:
        decimal.getcontext().prec = 3
        return str(decimal.Decimal(1) / 3)

    with ThreadPoolExecutor(1) as pool, _InRequest():
        before = decimal.getcontext().prec
        assert pool.submit(coarse).result() == "0.333"
        assert decimal.getcontext().prec == before > 3


def test_a_loop_in_a_thread_is_not_taken_for_the_one_that_its_request_runs_in(recording: Recording) -> None:
    """`sniffio` keeps in a context variable that one runs here."""

    async def elsewhere() -> object:
        return start.current_request()

    async def handler() -> tuple[object, object]:
        with _InRequest() as request, ThreadPoolExecutor(1) as pool:
            return request, pool.submit(anyio.run, elsewhere).result()

    request, found = anyio.run(handler)
    assert found is request


def test_a_thread_that_a_job_starts_works_for_the_request_of_the_job(recording: Recording) -> None:
    seen: list[request_span.RequestSpan | None] = []

    def job() -> None:
        thread = threading.Thread(target=lambda: seen.append(start.current_request()))
        thread.start()
        thread.join()

    with ThreadPoolExecutor(1) as pool, _InRequest() as request:
        pool.submit(job).result()
    assert seen == [request]


def test_a_thread_that_outlives_its_request_tells_nobody_else_of_it(recording: Recording) -> None:
    """What it calls from then on has a trace of its own."""
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


def test_jobs_of_a_pool_of_multiprocessings_are_not_of_who_made_it(recording: Recording) -> None:
    with _InRequest() as first:
        pool = ThreadPool(1)
    with pool, _InRequest() as second:
        assert pool.apply(start.current_request) in (None, second)
        assert not first.ended
