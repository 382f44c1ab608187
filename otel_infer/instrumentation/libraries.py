"""Libraries whose own queues and locks are none of the application: what they wait for is another function's work."""

from __future__ import annotations

from typing import Any

LIBRARIES = frozenset(
    (
        "amqp", "anyio", "arq", "asgiref", "billiard", "celery", "concurrent", "dramatiq", "gevent", "grpc", "gunicorn",
        "kombu", "logging", "multiprocessing", "opentelemetry", "ray", "redis", "rq", "sglang", "starlette", "torch", "tornado",
        "transformers", "uvicorn", "vllm", "waitress", "werkzeug",
    )
)  # fmt: skip
"""Packages: servers, pools, engines and job queues, which other hooks follow, and log handlers."""


def is_of_library(frame: Any) -> bool:
    """Returns whether the code of a frame is of one of these packages. `frame`: None if it is unknown."""
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in LIBRARIES
