"""Records the jobs of RQ's workers.

    Job.create ─ headers of the request are added to `meta` ─▶ Redis ─▶ Job.perform in a worker ─ the job, as a request

A worker forks a process for each job. The worker itself creates its rings first, so that one sidecar reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.job_exchange import Job, begin_job, list_headers
from otel_infer.ringbuffer.recorder import recorder

META_KEY = "otel_infer"
"""Key of the headers in a job's `meta`."""

instrumentor = Instrumentor("rq", "rq", ("rq",))


@instrumentor.patch_hot_path("rq.job:Job.create")
def _patch_create(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        job = original(*args, **kwargs)
        if hook.alive:
            try:
                headers = list_headers()
                if headers:
                    job.meta = {**job.meta, META_KEY: headers}
            except Exception as exc:
                hook.count_failure(exc)
        return job

    return create


@instrumentor.patch_hot_path("rq.job:Job.perform")
def _patch_perform(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def perform(self: Any) -> Any:
        exchange = begin_job(hook, _describe_job, self)
        if exchange is None:
            return original(self)
        with exchange:
            result = original(self)
        exchange.end()
        return result

    return perform


def _describe_job(job: Any) -> Job:
    headers = job.meta.get(META_KEY) if isinstance(job.meta, Mapping) else None
    return Job(
        "rq",
        str(job.func_name),
        str(job.origin or ""),
        str(job.id),
        headers or {},
        _to_unix_ns(job.enqueued_at),
    )


def _to_unix_ns(instant: Any) -> int:
    """Returns an instant of RQ, which is UTC, in unix ns; 0 if there is none."""
    if not isinstance(instant, datetime):
        return 0
    return int((instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() * 1e9)


@instrumentor.patch_hot_path("rq.worker.base:BaseWorker.work", optional=True, part="worker")
def _patch_work(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def work(*args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                recorder.ensure_rings()
            except Exception as exc:
                hook.mark_failed(exc)
        return original(*args, **kwargs)

    return work
