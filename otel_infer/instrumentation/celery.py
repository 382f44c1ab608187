"""Records the tasks of Celery's workers.

as_task_v2 ─ headers of the request are added ─▶ broker ─▶ build_tracer's trace_task ─ the task, as a request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.job_exchange import Job, add_headers, begin_job, read_put_at

FAILED = "FAILURE"
"""State of a task that raised; one that is retried or ignored has not failed."""

instrumentor = Instrumentor("celery", "celery", ("celery",))


@instrumentor.patch_hot_path("celery.app.amqp:AMQP.as_task_v2", part="client")
def _patch_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def as_task_v2(*args: Any, **kwargs: Any) -> Any:
        message = original(*args, **kwargs)
        if hook.alive:
            try:
                add_headers(message.headers)
            except Exception as exc:
                hook.count_failure(exc)
        return message

    return as_task_v2


@instrumentor.patch_hot_path("celery.app.trace:build_tracer", reads=("name", "eager"), part="worker")
def _patch_build_tracer(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def build_tracer(name: str, *args: Any, **kwargs: Any) -> Any:
        trace_task = original(name, *args, **kwargs)
        if not hook.alive or kwargs.get("eager"):
            return trace_task
        return _follow_task(name, trace_task, hook)

    return build_tracer


def _follow_task(name: str, trace_task: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns a function that runs a task as a request. Celery's own never raises: it returns the outcome."""

    def follow_task(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        exchange = begin_job(hook, _describe_task, name, uuid, request or {})
        if exchange is None:
            return trace_task(uuid, args, kwargs, request)
        with exchange:
            result = trace_task(uuid, args, kwargs, request)
        exchange.end(_find_error(result))
        return result

    return follow_task


def _describe_task(name: str, uuid: str, request: Mapping[str, Any]) -> Job:
    delivery = request.get("delivery_info") or {}
    put_at = max(read_put_at(request), _parse_instant(request.get("eta")))
    return Job("celery", name, str(delivery.get("routing_key") or ""), str(uuid), request, put_at)


def _parse_instant(text: Any) -> int:
    """Returns an instant in ISO 8601, unix ns; 0 if there is none."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9) if isinstance(text, str) else 0
    except ValueError:
        return 0


def _find_error(result: Any) -> BaseException | None:
    """Returns the exception of a task that failed."""
    info = getattr(result, "info", None)
    error = getattr(info, "retval", None) if getattr(info, "state", "") == FAILED else None
    return error if isinstance(error, BaseException) else None
