"""Records the jobs of job queues: from the put of a job, through its wait, to the end of its function.

    a request puts a job, with its headers ─▶ `queue wait` ─▶ a worker's function runs

The job has a CONSUMER span, a child of the request.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from opentelemetry import propagate

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange, can_record, encode_headers
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation, request_span, start
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.propagator_warnings import call_propagators

NS_PER_MS = 1_000_000
PUT_AT_HEADER = "otel-infer-put-at"
"""When a job was put, unix ns."""


class Job(NamedTuple):
    """A job that a worker begins.

    `system`: name of the library. `put_at`: when it was put, or was due, unix ns; 0 = unknown. `headers`: what was put
    with it.
    """

    system: str
    name: str
    queue: str
    id: str
    headers: Mapping[str, Any]
    put_at: int = 0


class JobExchange(ServerExchange):
    """One job in its worker."""

    __slots__ = ("job",)

    owner = "jobs"

    def __init__(self, job: Job, hook: Hook) -> None:
        """Begins a job. Where OpenTelemetry's instrumentation of the library runs, its span is used."""
        self.job = job
        super().__init__(hook, f"opentelemetry.instrumentation.{job.system}" in sys.modules)

    def name_span(self) -> str:
        return f"{events.PROCESS} {self.job.name}"

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers(self.job.headers.items())

    def find_path(self) -> str:
        return self.job.name

    def open_request(self) -> request_span.RequestSpan | None:
        """Opens the job's request, which has waited since the job was put."""
        request = super().open_request()
        if request is not None:
            put_at = _clock.wall_to_monotonic(self.job.put_at) if self.job.put_at else 0
            if 0 < put_at < self.arrived_at:
                request.record_event(events.StageEnded(_clock.now(), put_at, events.QUEUE_WAIT, 0))
        return request

    def close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        if request.has_server:
            job = self.job
            values = job.system, job.queue, job.id, events.PROCESS, events.PROCESS
            for key, value in zip(events.MESSAGING_KEYS, values):
                if value:
                    request.record_attribute(key, value)
        if exc is None:
            request.record_event(events.make_tuple(events.ResponseStarted, (_clock.now(),)))
        request.close(*classify_exception(exc))


def begin_job(hook: Hook, describe: Callable[..., Job], *described: Any) -> JobExchange | None:
    """Returns the exchange of a job that begins here; None if nothing records, or if it runs inside of a request.

    `describe`: returns the job, given the library's own objects. Its errors do not reach the worker.
    """
    try:
        if not can_record(hook) or start.find_request() is not None:
            return None
        return JobExchange(describe(*described), hook)
    except Exception as exc:
        hook.count_failure(exc)
        return None


def list_headers() -> dict[str, str]:
    """Returns the headers of the current request, or span, for a job that is put; empty if there is none."""
    request = start.current_request()
    headers: dict[str, str] = {}
    if request is not None:
        headers = propagation.inject(request)
        del headers[propagation.REQUEST_HEADER]
    else:
        call_propagators(propagate.inject, headers)
    return headers


def add_headers(carrier: MutableMapping[str, Any]) -> None:
    """Adds `list_headers` and the present time to a job that is put. Headers that the job has already stay."""
    for name, value in list_headers().items():
        carrier.setdefault(name, value)
    carrier[PUT_AT_HEADER] = str(_clock.wall_now())


def read_put_at(headers: Mapping[str, Any]) -> int:
    """Returns when a job was put, unix ns; 0 if its headers do not state it."""
    text = headers.get(PUT_AT_HEADER)
    return int(text) if isinstance(text, str) and text.isdecimal() else 0
