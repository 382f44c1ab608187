"""FastAPI's twin, Flask: puts jobs into a queue and waits for their results. `python -m tests.servers.apps.jobs_app PORT`."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from flask import Flask, Response, jsonify

from tests.servers.apps import jobs

app = Flask(__name__)
WAIT_S = 20.0


def put_celery(rows: int) -> Any:
    from tests.servers.apps.celery_jobs import app as celery_app

    return celery_app.send_task("classify", (rows,)).get(timeout=WAIT_S)


def put_rq(rows: int) -> Any:
    import redis
    import rq

    job = rq.Queue(connection=redis.Redis.from_url(jobs.REDIS)).enqueue(jobs.classify, rows)
    until = time.monotonic() + WAIT_S
    while (result := job.latest_result()) is None and time.monotonic() < until:
        time.sleep(0.02)
    if result is None or result.type is not result.Type.SUCCESSFUL:
        raise RuntimeError("the job failed")
    return result.return_value


def put_dramatiq(rows: int) -> Any:
    from tests.servers.apps.dramatiq_jobs import actor

    return actor.send(rows).get_result(block=True, timeout=int(WAIT_S * 1000))


def put_arq(rows: int) -> Any:
    async def put() -> Any:
        from arq import create_pool
        from arq.connections import RedisSettings

        pool = await create_pool(RedisSettings.from_dsn(jobs.REDIS))
        job = await pool.enqueue_job("classify_later", rows)
        return await job.result(timeout=WAIT_S, poll_delay=0.02)

    return asyncio.run(put())


PUTS = {"celery": put_celery, "rq": put_rq, "dramatiq": put_dramatiq, "arq": put_arq}


@app.post("/<library>/<int(signed=True):rows>")
def put_job(library: str, rows: int) -> Response:
    return jsonify(PUTS[library](rows))


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]), threaded=True)
