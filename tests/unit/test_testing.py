"""`capture`: the recorded requests in a user's own tests."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from opentelemetry import trace

import otel_infer
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.testing import capture
from otel_infer.tracing import request_span
from tests.support.story import text


def answer(question: str) -> str:
    """A hand-written server: a lookup, a prompt in two chunks, three tokens."""
    with otel_infer.request("chat", model="tiny") as request:
        with otel_infer.stage("rerank"):
            time.sleep(0.002)
        request.submitted(input_tokens=8)
        for number, (prompt, delivered) in enumerate([(4, 0), (4, 1), (0, 1), (0, 1)]):
            with otel_infer.step([request], prompt_tokens={request: prompt} if prompt else None) as step:
                if not delivered:
                    step.delivered = {request: 0}
                time.sleep(0.001 * number)
        request.finished("length")
    return question.upper()


TREE = text("""
    chat tiny
      rerank
      queue
      prefill
        prefill step ×2
      decode
        decode step ×2
""")


def test_capture_returns_the_stages_of_a_server() -> None:
    with capture() as captured:
        assert answer("why") == "WHY"
        (request,) = captured.requests()
        rerank = request.find_stage("rerank")
        assert rerank is not None and rerank.ended_at - rerank.started_at >= 2_000_000
        assert (request.input_tokens, request.output_tokens, request.model) == (8, 3, "tiny")
        assert captured.tree() == TREE


def test_step_is_drawn_once_with_a_stage_each() -> None:
    with capture() as captured:
        with otel_infer.request("chat", model="tiny") as request:
            request.submitted(input_tokens=8)
            for prompt, delivered in ((4, 0), (4, 1), (0, 1), (0, 1)):
                with otel_infer.stage("prefill" if prompt else "decode"):
                    with otel_infer.step(
                        [request], prompt_tokens={request: prompt} if prompt else None
                    ) as step:
                        step.delivered = {request: delivered}
            request.finished("length")
        assert captured.tree() == text("""
            chat tiny
              queue
              prefill
                prefill step ×1
              prefill
                prefill step ×1
              decode
                decode step ×2
              decode
        """)


def test_captured_requests_accumulate_and_remain_afterwards() -> None:
    with capture() as captured:
        assert captured.requests() == []
        answer("a")
        assert len(captured.requests()) == 1
        answer("b")
    assert len(captured.requests()) == 2
    assert captured.tree() == f"{TREE}\n{TREE}"


def test_times_are_ms_after_the_arrival() -> None:
    with capture() as captured, otel_infer.request("chat"):
        time.sleep(0.003)
    line = captured.tree(times=True)
    assert line.startswith("chat  0.0–")
    assert line.endswith(" ms")
    assert 3 <= float(line.split("–")[1].split()[0]) < 100


def test_requests_outside_the_capture_are_not_recorded() -> None:
    answer("before")
    with capture() as captured:
        assert recorder.active
    answer("after")
    assert captured.requests() == []
    assert (recorder.active, recorder.requests, request_span.span_factory) == (False, None, None)


def test_nested_capture_raises_an_error() -> None:
    with capture() as captured:
        with pytest.raises(RuntimeError, match="instrumented"), capture():
            pass
        answer("still")
        assert len(captured.requests()) == 1


def test_failing_test_deactivates_the_capture() -> None:
    with pytest.raises(ZeroDivisionError), capture() as captured, otel_infer.request("chat"):
        raise ZeroDivisionError("canary")
    assert not recorder.active
    (request,) = captured.requests()
    assert (request.outcome, request.error_type) == (events.ERROR, "ZeroDivisionError")


def test_capture_waits_for_a_request_in_flight() -> None:
    with capture() as captured:
        release = threading.Event()

        def serve() -> None:
            with otel_infer.request("chat"):
                release.wait(5)

        thread = threading.Thread(target=serve)
        thread.start()
        while not recorder.requests:
            time.sleep(0.001)
        assert captured.requests(timeout=0.02) == []
        threading.Timer(0.05, release.set).start()
        assert len(captured.requests()) == 1
        thread.join()


def test_requests_of_all_threads_are_captured() -> None:
    with capture() as captured:

        def serve() -> None:
            for _ in range(50):
                answer("x")

        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        requests = captured.requests()
    assert len(requests) == 200
    assert [request.output_tokens for request in requests] == [3] * 200
    assert not any(request.telemetry_lost for request in requests)


def test_unsampled_requests_are_captured() -> None:
    parent = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    from opentelemetry import context as otel_context

    with capture() as captured:
        token = otel_context.attach(context)
        try:
            answer("x")
        finally:
            otel_context.detach(token)
        assert captured.tree() == TREE


@pytest.fixture
def app() -> Any:
    fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")
    app = fastapi.FastAPI()

    @app.get("/health")
    def health() -> dict[str, bool]:
        return {"ok": True}

    @app.post("/v1/answer/{question}")
    async def ask(question: str) -> str:
        return await asyncio.to_thread(answer, question)

    return app


def test_web_server_is_captured_through_its_test_client(app: Any) -> None:
    from fastapi.testclient import TestClient

    with capture("asgi") as captured:
        client = TestClient(app)
        assert client.post("/v1/answer/why").json() == "WHY"
        client.post("/nowhere")
        tree = captured.tree()
    below = "\n".join("  " + line for line in TREE.splitlines())
    below = below.replace("chat tiny", "chat tiny\n    ingress", 1) + "\n    postprocess"
    assert tree.splitlines()[0] == "POST /v1/answer/{question}"
    assert below in tree
    assert tree.splitlines()[-1] == "POST"
