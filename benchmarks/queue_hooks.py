"""A put and a get of the application's queues: without a request, and for a request whose item a worker takes."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from contextvars import Context
from typing import Any

from benchmarks.hook_cases import Case, Steps
from otel_infer.instrumentation import batch_windows, queues
from otel_infer.tracing import context, start
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

WITHOUT_REQUEST_NS, WITH_REQUEST_NS = 200, 3000
"""Gates of a put and a get."""
MAKERS: dict[str, tuple[type, str, str]] = {
    "asyncio.Queue": (asyncio.Queue, "put_nowait", "get_nowait"),
    "queue.Queue": (queue.Queue, "put", "get"),
}


def make_cases() -> Iterator[Case]:
    """Two cases of each queue, and that of an awaited `get`. The hooks are installed here, and stay."""
    bare = {name: _make_bare(*maker) for name, maker in MAKERS.items()}
    queues.instrumentor.install()
    batch_windows.instrumentor.install()
    for name, (hooked, put_name, take_name) in MAKERS.items():
        methods = put_name, take_name
        yield Case(
            f"{name}, a put and a get, no request in flight",
            WITHOUT_REQUEST_NS,
            _repeat_alone(bare[name], *methods),
            _repeat_alone(hooked, *methods),
        )
        yield Case(
            f"{name}, a put by a request, a get by a worker",
            WITH_REQUEST_NS,
            _repeat_between(bare[name], *methods),
            _repeat_between(hooked, *methods),
        )
    yield Case(
        "asyncio.Queue, a put and an awaited get, no request in flight",
        WITHOUT_REQUEST_NS,
        _repeat_awaited(bare["asyncio.Queue"]),
        _repeat_awaited(asyncio.Queue),
    )


def _make_bare(kind: type, put_name: str, take_name: str) -> type:
    """Returns the queue with the methods that it has before the hooks are installed."""
    return type(kind.__name__, (kind,), {name: getattr(kind, name) for name in {put_name, take_name, "get"}})


def _repeat_alone(kind: type, put_name: str, take_name: str) -> Steps:
    """Calls the methods as an application does: by name, not through a bound method that is kept."""
    source = f"def run_steps(steps):\n for _ in range(steps):\n  found.{put_name}(1)\n  found.{take_name}()\n"
    names: dict[str, Any] = {"found": kind()}
    exec(source, names)
    alone = Context()  # another case may leave its request current
    return lambda steps: alone.run(names["run_steps"], steps)


def _repeat_awaited(kind: type) -> Steps:
    """A worker's `await queue.get()`, of an item that is there already."""
    found, worker = kind(), Context()

    async def take_items(steps: int) -> None:
        for _ in range(steps):
            found.put_nowait(1)
            await found.get()

    def run_steps(steps: int) -> None:
        with contextlib.suppress(StopIteration):
            worker.run(take_items(steps).send, None)

    return run_steps


def _repeat_between(kind: type, put_name: str, take_name: str) -> Steps:
    found = kind()
    put, take = getattr(found, put_name), getattr(found, take_name)
    worker = Context()

    def run_steps(steps: int) -> None:
        handler = Context()
        request = handler.run(_attach_request)
        for _ in range(steps):
            handler.run(put, 1)
            worker.run(take)
            worker.run(_mark_called)
        request.close()

    return run_steps


def _attach_request() -> RequestSpan:
    request = start.open_request("benchmark", owner="benchmark")
    assert request is not None
    request.attach()
    return request


def _mark_called() -> None:
    """Does what is left of a call of a model: the next item is of another batch."""
    work = context.current_context().get(REQUEST_KEY)
    if work is not None:
        work._is_called = True  # type: ignore[attr-defined]
