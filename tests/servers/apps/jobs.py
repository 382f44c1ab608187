"""One job, `classify`, for each job queue, and how a server puts it. REDIS names the server of Redis."""

from __future__ import annotations

import os
from typing import Any

REDIS = os.environ.get("REDIS", "redis://127.0.0.1:6379")


def classify(rows: int) -> list[list[float]]:
    """Classifies some rows; −1 fails, 0 calls no model."""
    from tests.servers.apps.scorer import score

    if rows < 0:
        raise ValueError("no rows")
    return score(rows) if rows else []


def make_celery() -> Any:
    import celery

    app = celery.Celery("jobs", broker=REDIS, backend=REDIS)
    app.task(name="classify")(classify)
    return app


def make_dramatiq() -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    broker = RedisBroker(url=REDIS)
    broker.add_middleware(Results(backend=RedisBackend(url=REDIS)))
    dramatiq.set_broker(broker)
    return dramatiq.actor(classify, store_results=True, max_retries=0)


async def classify_later(ctx: Any, rows: int) -> list[list[float]]:
    """arq's job."""
    return classify(rows)
