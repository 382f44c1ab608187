"""MLServer's adaptive batcher and worker, on stand-ins with the same functions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from otel_infer.instrumentation import mlserver, queues
from otel_infer.ringbuffer import events
from otel_infer.tracing import start, work
from tests.support.rings import Recording, record_with, stages_of

SIZE = 3
SOURCE = """
import asyncio

class Batch:
    def __init__(self, payloads):
        self.inference_requests = payloads

class AdaptiveBatcher:
    def __init__(self, model):
        self.model, self._requests, self.futures, self._task = model, asyncio.Queue(), {}, None

    async def predict(self, req):
        self.futures[id(req)] = asyncio.get_running_loop().create_future()
        await self._requests.put((id(req), req))
        self._start_batcher_if_needed()
        return await self.futures[id(req)]

    def _start_batcher_if_needed(self):
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._batcher())

    async def _batcher(self):
        async for batch in self._batch_requests():
            asyncio.create_task(self.run(batch))

    async def run(self, batch):
        await asyncio.sleep(0)
        names = self.model()
        for number in batch.inference_requests:
            self.futures[number].set_result(names)

    async def _batch_requests(self):
        while not self._requests.empty():
            payloads = {}
            while len(payloads) < %d:
                try:
                    number, payload = await asyncio.wait_for(self._requests.get(), 0.02)
                except TimeoutError:
                    break
                payloads[number] = payload
            yield Batch(payloads)

class Worker:
    async def _process_request(self, request):
        await asyncio.sleep(0.01)
        return self.model()

    async def _process_model_update(self, update):
        return None
"""


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    for target in (mlserver.BATCHER, mlserver.WORKER):
        module: Any = ModuleType(target.partition(":")[0])
        exec(SOURCE % SIZE, module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with record_with(queues.instrumentor, mlserver.instrumentor) as recording:
        yield recording


def call_model() -> list[str]:
    """Returns the names of the requests that a model is called for."""
    request = start.begin_model_call()
    if request is None:
        return []
    request.record_stage(events.FORWARD, time.monotonic_ns(), 1)
    return [member.arrived_name for member in getattr(request, "members", (request,))]  # type: ignore[attr-defined]


def open_request(name: str) -> Any:
    request: Any = start.open_request(name, owner="test", operation="inference")
    request.arrived_name = name
    return request


async def predict(batcher: Any, name: str) -> Any:
    request = open_request(name)
    request.attach()
    result = await batcher.predict([name])
    request.close()
    return result


async def run_bursts(*bursts: str) -> list[Any]:
    batcher = sys.modules["mlserver.batching.adaptive"].AdaptiveBatcher(call_model)
    found = []
    for names in bursts:
        found += await asyncio.gather(*[predict(batcher, name) for name in names])
    assert batcher.__dict__.get(mlserver.ITEMS_ATTRIBUTE, {}) == {}
    return found


def test_each_batch_is_that_of_its_requests(recording: Recording) -> None:
    """Also where a later request starts the batcher again, or the next batch is filled before the model is called."""
    found = asyncio.run(run_bursts("abc", "d", "efghij"))
    assert found == [["a", "b", "c"]] * 3 + [["d"]] + [["e", "f", "g"]] * 3 + [["h", "i", "j"]] * 3
    for record in recording.records():
        assert [stage for stage in stages_of(record) if stage != "queue wait"] == ["batch wait", "forward"]


def test_an_error_of_our_own_changes_no_result(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlserver, "begin_batch", lambda *_: 1 / 0)
    assert asyncio.run(run_bursts("ab")) == [[], []]
    monkeypatch.setattr(mlserver, "describe_item", lambda: 1 / 0)
    assert len(asyncio.run(run_bursts("ab"))) == 2


def test_a_worker_works_for_the_item_it_took(recording: Recording) -> None:
    async def run() -> list[Any]:
        worker, tasks = sys.modules["mlserver.parallel.worker"].Worker(), []
        worker.model = call_model
        for name in "ab":
            work.attach_work(work.Work(work.Worker(work.find_worker())).take_next(open_request(name)))
            tasks.append(asyncio.create_task(worker._process_request(name)))
            assert start.find_request() is None
        return await asyncio.gather(*tasks, worker._process_request("c"))

    assert asyncio.run(run()) == [["a"], ["b"], []]
