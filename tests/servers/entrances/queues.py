"""Queues and pools inside of a process, and jobs of another one. A request is in flight while its work is put."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import otel_infer
from tests.servers.entrances.handlers import TEXT, Handlers, KeptError


def _finish(handlers: Handlers, future: Future[str]) -> None:
    try:
        handlers.answers.append(future.result(10))
    except KeptError as error:
        handlers.errors.append(error)


def drive_thread_queue(handlers: Handlers) -> None:
    items: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        while (item := items.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    worker = threading.Thread(target=work)
    worker.start()
    for function in (handlers.work, handlers.fail):
        with otel_infer.request("chat"):
            future: Future[str] = Future()
            items.put((function, future))
            _finish(handlers, future)
    items.put(None)
    worker.join()


def drive_asyncio_queue(handlers: Handlers) -> None:
    async def work(items: asyncio.Queue[Any]) -> None:
        while (item := await items.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    async def serve() -> None:
        items: asyncio.Queue[Any] = asyncio.Queue()
        worker = asyncio.create_task(work(items))
        for function in (handlers.work, handlers.fail):
            with otel_infer.request("chat"):
                future = asyncio.get_running_loop().create_future()
                await items.put((function, future))
                try:
                    handlers.answers.append(await future)
                except KeptError as error:
                    handlers.errors.append(error)
        await items.put(None)
        await worker

    asyncio.run(serve())


def drive_thread_pool(handlers: Handlers) -> None:
    with ThreadPoolExecutor(1) as pool, otel_infer.request("chat"):
        for function in (handlers.work, handlers.fail):
            _finish(handlers, pool.submit(function))


def work_elsewhere(text: str) -> str:
    """Runs in another process."""
    return text.upper()


def fail_elsewhere(text: str) -> str:
    """Runs in another process."""
    raise KeptError(text)


def drive_process_pool(handlers: Handlers) -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as pool, otel_infer.request("chat"):
        for function in (work_elsewhere, fail_elsewhere):
            _finish(handlers, pool.submit(function, TEXT))


def drive_multiprocessing_pool(handlers: Handlers) -> None:
    with get_context("fork").Pool(1) as pool, otel_infer.request("chat"):
        for function in (work_elsewhere, fail_elsewhere):
            try:
                handlers.answers += pool.map(function, [TEXT])
            except KeptError as error:
                handlers.errors.append(error)
        pool.close()
        pool.join()


def drive_process_queue(handlers: Handlers) -> None:
    context = get_context("fork")
    items, results = context.Queue(), context.Queue()
    worker = context.Process(target=echo_elsewhere, args=(items, results))
    worker.start()
    with otel_infer.request("chat"):
        items.put({"text": TEXT, "numbers": [1, 2]})
        handlers.answers.append(repr(results.get(timeout=10)))
    items.put(None)
    worker.join(10)


def echo_elsewhere(items: Any, results: Any) -> None:
    """Runs in another process."""
    while (item := items.get()) is not None:
        results.put({**item, "text": work_elsewhere(item["text"])})
