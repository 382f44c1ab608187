"""A job of a job queue: a child of the request that has put it, from its put to the end of its function."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pytest
from opentelemetry.context import Context

from otel_infer import semconv
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.export.spans.tree import CONSUMER, build_request_spans
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.job_exchange import PUT_AT_HEADER, Job, add_headers, begin_job, read_put_at
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import attach, detach
from otel_infer.tracing.request_span import RequestSpan
from tests.support.rings import Recording, stages_of

WAIT_S = 0.02


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    token = attach(Context())
    yield recording
    detach(token)
    recording.stop()


def put_job() -> tuple[RequestSpan, dict[str, str]]:
    """Returns a request, and the headers of a job that it puts."""
    request = start.open_request("POST /", owner="test", server=True)
    assert request is not None
    token, headers = request.attach(), {"mine": "kept"}
    add_headers(headers)
    detach(token)
    return request, headers


def work(headers: Mapping[str, str], error: Exception | None = None, put_at: int = 0) -> None:
    """Does a job as a worker does, whose function calls a model unless it raises."""
    job = Job("celery", "classify", "high", "job-1", headers, put_at or read_put_at(headers))
    exchange = begin_job(Hook("test"), lambda: job)
    assert exchange is not None
    try:
        with exchange:
            if error is not None:
                raise error
            request = start.begin_model_call()
            assert request is not None
            request.set_operation("inference", "torch", "Scorer")
            request.record_stage(events.FORWARD, time.monotonic_ns(), 1)
        exchange.end()
    except ValueError:
        pass


def test_job_is_a_child_of_the_request_and_has_waited(recording: Recording) -> None:
    request, headers = put_job()
    assert headers["mine"] == "kept" and "otel-infer-request" not in headers
    time.sleep(WAIT_S)
    work(headers)
    request.close()
    job, web = recording.records()
    assert (job.trace_id, job.parent_span_id) == (web.trace_id, web.span_id)
    assert job.name == "process classify" and job.operation == "inference" and not web.operation
    assert stages_of(job)[0] == "queue wait"
    assert job.stages[0].ended_at - job.stages[0].started_at >= WAIT_S * 1e9
    assert abs(job.arrived_at - job.stages[0].started_at) < 1_000_000


def test_span_of_a_job_is_a_consumer_s(recording: Recording) -> None:
    request, headers = put_job()
    work(headers)
    request.close()
    job, _ = recording.records()
    span, *_ = build_request_spans(job, Decision(True, 1 << 30, "all"))
    attributes = {**span.attributes, **span.shared}
    assert span.kind == CONSUMER and span.name == "process classify"
    assert attributes == {
        semconv.MESSAGING_SYSTEM: "celery",
        semconv.MESSAGING_DESTINATION: "high",
        semconv.MESSAGING_MESSAGE_ID: "job-1",
        semconv.MESSAGING_OPERATION_NAME: "process",
        semconv.MESSAGING_OPERATION_TYPE: "process",
    }


def test_job_that_raises_is_an_error_and_no_inference(recording: Recording) -> None:
    work({}, ValueError("no rows"))
    (job,) = recording.records()
    assert (job.outcome, job.error_type, job.operation) == (events.ERROR, "ValueError", "")


def test_job_inside_of_a_request_is_a_part_of_it(recording: Recording) -> None:
    request, headers = put_job()
    token = request.attach()
    assert begin_job(Hook("test"), Job, "rq", "classify", "", "", headers) is None
    detach(token)
    request.close()


@pytest.mark.parametrize(
    "put_at", ["", "soon", "-5", str(10**19)], ids=["none", "a word", "negative", "in the future"]
)
def test_job_without_a_known_put_has_no_wait(recording: Recording, put_at: str) -> None:
    work({PUT_AT_HEADER: put_at})
    (job,) = recording.records()
    assert "queue wait" not in stages_of(job)


def test_headers_of_another_instrumentation_stay(recording: Recording) -> None:
    request, _ = put_job()
    token = request.attach()
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    add_headers(headers)
    detach(token)
    request.close()
    assert headers["traceparent"] == f"00-{'1' * 32}-{'2' * 16}-01"


def test_error_of_a_description_does_not_reach_the_worker(recording: Recording) -> None:
    def describe() -> Job:
        raise AttributeError("a message without a name")

    assert begin_job(Hook("test"), describe) is None
