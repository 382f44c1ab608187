"""Threads carry the request along that they were started for; those of pools, the request of each job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import pytest

from otel_infer import ingress
from otel_infer.integrations.threads import integration
from tests.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    integration.install()
    recording = Recording()
    yield recording
    recording.stop()
    integration.remove()


class _InRequest:
    """A request of ours is current here."""

    def __enter__(self) -> ingress.LiveRequest:
        request = ingress.open_request("POST", owner="test")
        assert request is not None
        self._request, self._token = request, request.attach()
        return request

    def __exit__(self, *_: object) -> None:
        ingress.detach(self._token)


def test_a_thread_works_for_the_request_that_it_was_started_in(recording: Recording) -> None:
    seen: list[ingress.LiveRequest | None] = []
    with _InRequest() as request:
        thread = threading.Thread(target=lambda: seen.append(ingress.current()))
        thread.start()
        thread.join()
    assert seen == [request]


def test_a_job_of_a_pool_works_for_the_request_that_it_comes_from_whoever_started_the_thread(
    recording: Recording,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with _InRequest() as first:
            assert pool.submit(ingress.current).result() is first
        assert pool.submit(ingress.current).result() is None
        with _InRequest() as second:
            assert pool.submit(ingress.current).result() is second
        assert pool.submit(ingress.current).result() is None


def test_so_does_a_job_of_anyios_and_its_thread_keeps_nobody_alive(recording: Recording) -> None:
    async def jobs() -> tuple[object, object, object]:
        with _InRequest() as request:
            own = await anyio.to_thread.run_sync(ingress.current)
        return request, own, await anyio.to_thread.run_sync(ingress.current)

    request, own, after = anyio.run(jobs)
    assert own is request
    assert after is None


def test_a_pool_of_other_interpreters_gets_its_jobs_as_they_are(recording: Recording) -> None:
    """They are pickled on their way."""

    class Pool(ThreadPoolExecutor):
        pass

    Pool.__module__ = "concurrent.futures.interpreter"
    with Pool(1) as pool, _InRequest():
        assert pool.submit(ingress.current).result() is None
