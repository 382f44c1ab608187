"""A task that outlives its request: what it does later is no part of that request's trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from otel_infer.assembly.records.request import UserLink
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def open_request(name: str) -> request_span.RequestSpan:
    request = start.open_request(name, owner="test")
    assert request is not None
    return request


class LazyWorker:
    """A worker task that the first request starts, and that runs the jobs of all requests."""

    def __init__(self) -> None:
        self.jobs: asyncio.Queue[str] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.done = 0

    async def submit(self, name: str) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self._run())
        await self.jobs.put(name)
        expected = self.done + 1
        while self.done < expected:
            await asyncio.sleep(0)

    async def _run(self) -> None:
        while True:
            name = await self.jobs.get()
            open_request(name).close()
            self.done += 1


def test_jobs_of_a_lazy_worker_are_roots_after_its_request(recording: Recording) -> None:
    async def serve() -> None:
        worker = LazyWorker()
        for number in range(3):
            request = open_request(f"POST {number}")
            token = request.attach()
            await worker.submit(f"job {number}")
            detach(token)
            request.close()
        assert worker.task is not None
        worker.task.cancel()

    asyncio.run(serve())
    records = {record.name: record for record in recording.records()}
    first = records["POST 0"]
    assert records["job 0"].parent_span_id == first.span_id
    for name in ("job 1", "job 2"):
        job = records[name]
        assert (job.parent_span_id, job.trace_id != first.trace_id) == (b"", True)
        assert job.links == [UserLink(first.trace_id, first.span_id, {})]


def test_another_current_span_stays_the_parent(recording: Recording) -> None:
    request = open_request("POST")
    token = request.attach()
    request.close()
    with trace.use_span(NonRecordingSpan(SpanContext(1, 2, is_remote=False))):
        assert open_request("job").get_span_context().trace_id == 1
    detach(token)
