"""A request's waits for a thread of a pool, or for a lock, are stages with the pool's size or the lock's kind."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest

from otel_infer.instrumentation import threading as thread_hooks
from otel_infer.instrumentation import waits
from otel_infer.ringbuffer import events
from tests.support.rings import Recording
from tests.unit.instrumentation.test_threading import _InRequest as InRequest

HELD_S = 0.05


@pytest.fixture
def recording() -> Iterator[Recording]:
    for instrumentor in (thread_hooks.instrumentor, waits.instrumentor):
        instrumentor.install()
        assert instrumentor.status.drift is None
    recording = Recording()
    yield recording
    recording.stop()
    for instrumentor in (waits.instrumentor, thread_hooks.instrumentor):
        instrumentor.remove()


class _InRequest(InRequest):
    """Opens a request, makes it current, and closes it."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._request.close(events.OK)


def find_waits(recording: Recording) -> list[tuple[str, Any]]:
    """Returns name and attribute of each recorded wait, all of which last as long as the lock or pool was busy."""
    (record,) = recording.records()
    assert all(stage.ended_at - stage.started_at > HELD_S * 0.5e9 for stage in record.stages)
    return [(stage.name, *stage.attributes.values()) for stage in record.stages]  # type: ignore[misc]


def test_job_waited_for_a_thread_of_its_executor(recording: Recording) -> None:
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(time.sleep, HELD_S) for _ in range(2)]
        with _InRequest():
            assert pool.submit(lambda: 7).result() == 7
        assert len(busy) == 2
    assert find_waits(recording) == [("pool wait", 2)]


def test_a_job_may_have_any_keywords(recording: Recording) -> None:
    def job(**given: Any) -> dict[str, Any]:
        return given

    given = {"self": 1, "call": 2, "args": 3, "request": 4}
    with ThreadPoolExecutor(1) as pool, _InRequest():
        assert pool.submit(job, **given).result() == given


def test_idle_pool_has_no_wait(recording: Recording) -> None:
    with ThreadPoolExecutor(2) as pool, _InRequest():
        assert pool.submit(lambda: 7).result() == 7
    assert find_waits(recording) == []


def test_call_waited_for_a_thread_of_anyio(recording: Recording) -> None:
    async def main() -> int:
        limiter = anyio.CapacityLimiter(1)
        run = functools.partial(anyio.to_thread.run_sync, limiter=limiter)
        busy = asyncio.create_task(run(functools.partial(time.sleep, HELD_S)))
        await asyncio.sleep(0.01)
        with _InRequest():
            result = await run(lambda: 7)
        await busy
        return result

    assert asyncio.run(main()) == 7
    assert find_waits(recording) == [("pool wait", 1)]


@pytest.mark.parametrize(
    ("make", "kind"),
    [(asyncio.Lock, "asyncio.Lock"), (functools.partial(asyncio.Semaphore, 1), "asyncio.Semaphore")],
)
def test_task_waited_for_a_lock_of_asyncio(recording: Recording, make: Callable[[], Any], kind: str) -> None:
    async def main() -> None:
        lock = make()

        async def hold() -> None:
            async with lock:
                await asyncio.sleep(HELD_S)

        busy = asyncio.create_task(hold())
        await asyncio.sleep(0)
        with _InRequest():
            async with lock:
                pass
        await busy

    asyncio.run(main())
    assert find_waits(recording) == [("lock wait", kind)]


def test_task_waited_for_a_condition_of_asyncio(recording: Recording) -> None:
    async def main() -> None:
        condition = asyncio.Condition()

        async def notify() -> None:
            await asyncio.sleep(HELD_S)
            async with condition:
                condition.notify_all()

        busy = asyncio.create_task(notify())
        with _InRequest():
            async with condition:
                await condition.wait()
        await busy

    asyncio.run(main())
    assert find_waits(recording) == [("lock wait", "asyncio.Condition")]


@pytest.mark.parametrize("is_context", [True, False])
def test_thread_waited_for_a_semaphore(recording: Recording, is_context: bool) -> None:
    semaphore = threading.Semaphore(1)
    semaphore.acquire()
    threading.Timer(HELD_S, semaphore.release).start()
    with _InRequest():
        if is_context:
            with semaphore:
                pass
        else:
            assert semaphore.acquire(timeout=5)
    assert find_waits(recording) == [("lock wait", "threading.Semaphore")]


def test_thread_waited_for_a_condition(recording: Recording) -> None:
    condition, ready = threading.Condition(), []

    def notify() -> None:
        with condition:
            ready.append(1)
            condition.notify_all()

    threading.Timer(HELD_S, notify).start()
    with _InRequest(), condition:
        assert condition.wait_for(lambda: ready, 5)
    assert find_waits(recording) == [("lock wait", "threading.Condition")]


def test_queue_and_future_are_no_locks(recording: Recording) -> None:
    """They wait for the work of another function, which has a name of its own."""
    items: queue.Queue[int] = queue.Queue()
    threading.Timer(HELD_S, items.put, [7]).start()
    with ThreadPoolExecutor(1) as pool, _InRequest():
        assert items.get(timeout=5) == 7
        pool.submit(time.sleep, HELD_S).result()
    assert find_waits(recording) == []


@pytest.mark.parametrize(
    "module", ["asgiref.current_thread_executor", "grpc._server", "gunicorn.workers.gthread"]
)
def test_the_condition_of_a_server_is_no_lock_of_the_application(recording: Recording, module: str) -> None:
    """An asynchronous view of Django runs while asgiref's thread waits on a condition."""
    names: dict[str, Any] = {"__name__": module, "condition": threading.Condition()}
    exec("def wait():\n with condition:\n  condition.wait(0.03)", names)
    with _InRequest():
        names["wait"]()
    assert find_waits(recording) == []


def test_wait_after_the_first_token_is_not_recorded(recording: Recording) -> None:
    semaphore = threading.Semaphore(0)
    threading.Timer(HELD_S, semaphore.release).start()
    with _InRequest() as request:
        request.record_token_reached()
        assert semaphore.acquire(timeout=5)
    assert find_waits(recording) == []


def test_exception_passes_and_ends_the_wait(recording: Recording) -> None:
    async def main() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        with _InRequest():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lock.acquire(), HELD_S)

    asyncio.run(main())
    assert find_waits(recording) == [("lock wait", "asyncio.Lock")]


def test_lock_of_another_kind_works_as_before(recording: Recording) -> None:
    """A subclass may lack what tells whether it is free."""

    class Odd(threading.Semaphore):
        def __init__(self) -> None:
            self.acquired = 0

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    with _InRequest(), pytest.raises(AttributeError, match="_cond"):
        Odd().acquire()
    assert find_waits(recording) == []
