"""Records the events of Gradio's queue: each is a job, below the request that has joined the queue.

    POST /queue/join ─ Event ─▶ `queue wait` ─▶ Queue.process_events ─ the function, for an event or a batch of them

The client gets the result by another request, a stream of server-sent events. The job ends with the last part of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.job_exchange import Job, JobExchange, add_headers, begin_job, read_put_at
from otel_infer.tracing import context
from otel_infer.tracing.batch_request import attach_members

HEADERS_ATTRIBUTE = "otel_infer_headers"

instrumentor = Instrumentor("gradio", "gradio", ("gradio",))
_errors: ContextVar[list[BaseException] | None] = ContextVar("otel_infer-gradio-errors", default=None)
"""The exceptions that the function of the current job has raised."""


@instrumentor.patch_hot_path("gradio.queueing:Event.__init__")
def _patch_event(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.alive:
            try:
                headers: dict[str, str] = {}
                add_headers(headers)
                setattr(self, HEADERS_ATTRIBUTE, headers)
            except Exception as exc:
                hook.count_failure(exc)

    return init


@instrumentor.patch_hot_path("gradio.queueing:Queue.process_events", reads=("events",))
def _patch_process(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def process_events(self: Any, events: Any, *args: Any, **kwargs: Any) -> Any:
        jobs = _begin_jobs(events, hook) if hook.alive else []
        if not jobs:
            return await original(self, events, *args, **kwargs)
        errors: list[BaseException] = []
        _errors.set(errors)  # Gradio calls this in a new task
        token = _attach_jobs(jobs, hook)
        try:
            return await original(self, events, *args, **kwargs)
        except BaseException as exc:
            errors.append(exc)
            raise
        finally:
            if token is not None:
                context.detach(token)
            for job in jobs:
                job.end(errors[0] if errors else None)

    return process_events


def _begin_jobs(events: Sequence[Any], hook: Hook) -> list[JobExchange]:
    """Returns the jobs of the events whose clients still wait."""
    jobs = [begin_job(hook, _describe_event, event) for event in events if event.alive]
    return [job for job in jobs if job is not None]


def _describe_event(event: Any) -> Job:
    headers = getattr(event, HEADERS_ATTRIBUTE, None) or {}
    name = getattr(event.fn, "api_name", None) or getattr(event.fn, "name", None) or "function"
    return Job("gradio", str(name), str(event.concurrency_id), str(event._id), headers, read_put_at(headers))


def _attach_jobs(jobs: Sequence[JobExchange], hook: Hook) -> Any:
    """Makes the job current, or the batch of them. Returns the token for `detach`, or None."""
    try:
        requests = [job.request for job in jobs if job.request is not None]
        return jobs[0].attach() if len(requests) < 2 else attach_members(requests)
    except Exception as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path("gradio.route_utils:call_process_api")
def _patch_call(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def call_process_api(*args: Any, **kwargs: Any) -> Any:
        try:
            return await original(*args, **kwargs)
        except Exception as exc:
            errors = _errors.get() if hook.alive else None
            if errors is not None:
                errors.append(exc)
            raise

    return call_process_api
