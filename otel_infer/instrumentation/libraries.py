"""Libraries whose own queues and locks are none of the application: what they wait for is another function's work."""

from __future__ import annotations

from typing import Any

LIBRARIES = frozenset(
    (
        "aiohttp", "amqp", "anyio", "arq", "asgiref", "billiard", "botocore", "celery", "concurrent", "dramatiq", "gevent",
        "grpc", "gunicorn", "httpcore", "httpx", "kafka", "kombu", "logging", "multiprocessing", "opentelemetry", "pika",
        "psycopg_pool", "pymongo", "ray", "redis", "requests", "rq", "sglang", "sqlalchemy", "starlette", "torch", "tornado",
        "transformers", "urllib3", "uvicorn", "vllm", "waitress", "werkzeug",
    )
)  # fmt: skip
"""Packages: servers, thread pools, engines and job queues, which other hooks follow; clients with pools of connections; log handlers."""


def is_of_library(frame: Any) -> bool:
    """Returns whether the code of a frame is of one of these packages. `frame`: None if it is unknown."""
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in LIBRARIES
