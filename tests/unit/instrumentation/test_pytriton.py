"""The hooks on PyTriton's connector, handler and settings, on stand-ins with the same functions."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext

from otel_infer.instrumentation import pytriton
from tests.support.rings import Recording, record_with, stages_of

STAGES = ["ingress", "queue wait", "infer function", "postprocess"]
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
PROXY = """
import asyncio

class RequestsResponsesConnector:
    def __init__(self):
        self._responses_queues = {}

    async def handle_requests(self, scope, requests_payload, send):
        queue = self._responses_queues[scope["requests_id"]] = asyncio.Queue()
        try:
            task = self.handler.run_inference(scope, requests_payload)
            while True:
                responses = await queue.get()
                if isinstance(responses, Exception):
                    await send(scope, 2, str(responses).encode())
                    break
                await send(scope, 1, b"" if responses is None else self.serialize(responses))
                if responses is None:
                    break
            await task
        except Exception as error:
            await send(scope, 2, str(error).encode())

    def serialize(self, responses):
        return b"".join(responses)

    def send(self, scope, flags, responses):
        self._responses_queues[scope["requests_id"]].put_nowait(responses)

class InferenceHandler:
    def run_inference(self, scope, requests):
        return asyncio.ensure_future(self._handle_requests(scope, requests))

    async def _handle_requests(self, scope, requests):
        try:
            self.connector.send(scope, 0, self.function(requests))
            self.connector.send(scope, 1, None)
        except Exception as error:
            self.connector.send(scope, 2, error)
"""
TRITON = """
class Triton:
    def _prepare_triton_config(self, workspace):
        self._triton_server_config = dict(self.options)
"""


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    for name, source in (("pytriton", ""), (pytriton.PROXY, PROXY), ("pytriton.triton", TRITON)):
        module = ModuleType(name)
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(pytriton, "_forwarding", {})
    with record_with(pytriton.instrumentor) as recording:
        yield recording


def make_request(**parameters: Any) -> Any:
    return SimpleNamespace(parameters={"traceparent": TRACEPARENT, **parameters}, span=None)


def run_batch(function: Callable[[Any], Any], *requests: Any, workspace: str = "/w") -> list[bytes]:
    """Runs a batch. Returns what is sent to Triton."""
    module: Any = sys.modules[pytriton.PROXY]
    connector, handler, sent = module.RequestsResponsesConnector(), module.InferenceHandler(), []
    config = SimpleNamespace(model_name="tiny", backend_parameters={"workspace-path": workspace})
    connector.handler, handler.connector, handler.function = handler, connector, function
    handler._validator = SimpleNamespace(_model_config=config)

    async def send(scope: Any, flags: int, payload: bytes) -> None:
        sent.append(payload)

    asyncio.run(connector.handle_requests({"requests_id": b"1"}, list(requests), send))
    return sent


def make_triton(path: str, **options: str) -> Any:
    triton = sys.modules["pytriton.triton"].Triton()
    triton.options = options
    triton._prepare_triton_config(SimpleNamespace(path=Path(path)))
    return triton._triton_server_config


def answer(requests: Any) -> list[bytes]:
    return [b"y"] * len(requests)


def fail(requests: Any) -> Any:
    raise KeyError("kept")


def test_requests_of_a_batch_have_its_stages(recording: Recording) -> None:
    assert run_batch(answer, make_request(), make_request()) == [b"yy", b""]
    records = recording.records()
    assert [stages_of(record) for record in records] == [STAGES] * 2
    assert {record.trace_id.hex() for record in records} == {"a" * 32}
    assert [record.model for record in records] == ["tiny"] * 2
    assert [record.error_type for record in records] == [""] * 2


def test_errors_are_those_of_the_function_and_of_serialization(recording: Recording) -> None:
    assert run_batch(fail, make_request()) == [b"'kept'"]
    assert run_batch(lambda requests: ["text"], make_request())[-1].startswith(b"sequence item 0")
    assert [record.error_type for record in recording.records()] == ["KeyError", "TypeError"]


@pytest.mark.parametrize("trace_id", ["a" * 32, "c" * 32])
def test_span_of_its_own_tracing_is_the_parent_in_the_clients_trace(
    trace_id: str, recording: Recording
) -> None:
    """Where Triton has not sampled a request, PyTriton's span begins a trace of its own."""
    request = make_request()
    request.span = NonRecordingSpan(SpanContext(int(trace_id, 16), 7, is_remote=False))
    run_batch(answer, request)
    (record,) = recording.records()
    is_below = trace_id == "a" * 32
    assert record.trace_id.hex() == "a" * 32
    assert record.parent_span_id.hex() == (f"{7:016x}" if is_below else "b" * 16)
    assert any(record.server_span_id) is not is_below


@pytest.mark.parametrize("name", ["__init__", "open_requests", "begin_call", "end_call", "note_sent"])
def test_an_error_of_our_own_changes_no_response(
    name: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count(requests: Any) -> Any:
        calls.append(requests)
        return answer(requests)

    monkeypatch.setattr(pytriton.InferenceBatch, name, lambda *_: 1 / 0)
    assert run_batch(count, make_request()) == [b"y", b""]
    assert run_batch(fail, make_request()) == [b"'kept'"]
    assert len(calls) == 1
    recording.records()
    assert recording.in_flight == 0


def test_headers_are_forwarded_and_hidden_from_the_function(recording: Recording) -> None:
    config = make_triton("/w")
    patterns = {config[option] for option in pytriton.PATTERN_OPTIONS}
    (pattern,) = patterns
    assert (
        re.match(pattern, "Traceparent") and not re.match(pattern, "x-traceparent-b") and " " not in pattern
    )
    request, other = make_request(Tracestate="a=b", depth=1), make_request()
    run_batch(answer, request)
    run_batch(answer, other, workspace="/other")
    assert request.parameters == {"depth": 1}
    assert other.parameters == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize("option", pytriton.PATTERN_OPTIONS)
def test_pattern_of_the_user_stays(option: str, recording: Recording) -> None:
    assert make_triton("/w", **{option: "x-.*"}) == {option: "x-.*"}
    request = make_request()
    run_batch(answer, request)
    assert request.parameters == {"traceparent": TRACEPARENT}
