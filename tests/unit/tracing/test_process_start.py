"""The start of a server process: recorded once, and never by an import alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from otel_infer import _clock
from otel_infer.tracing import process_start, request_span, span_ids

SERVER = """
import json, os, sys
import otel_infer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))

def serve():
    otel_infer.instrument(tracer_provider=provider, integrations=("asgi",))
    with otel_infer.request("chat", model="tiny"):
        pass
    otel_infer.flush()
    otel_infer.uninstrument()

serve()
serve()
rows = [[s.name, s.context.span_id, s.start_time, [l.context.span_id for l in s.links]] for s in exporter.get_finished_spans()]
print(json.dumps(rows))
"""


@pytest.fixture
def span_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = span_ids.SdkSpanFactory(ALWAYS_OFF, RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", factory)


def test_start_event_is_stable_until_recorded(span_factory: None) -> None:
    start_recorder = process_start.ProcessStartRecorder()
    event = start_recorder.make_event()
    assert event is not None and event == start_recorder.make_event()
    assert any(event.trace_id) and any(event.span_id)
    assert event.at <= _clock.now()
    now, wall = _clock.read_clocks()
    assert abs((wall - now) - (event.wall_at - event.at)) < 1_000_000_000
    start_recorder.mark_recorded()
    assert start_recorder.make_event() is None


def test_engine_start_is_a_child_of_server_start(span_factory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INFER_START", "")  # registers the variable for cleanup
    monkeypatch.setattr(process_start.recorder, "role", process_start.SERVER)
    server_start = process_start.ProcessStartRecorder().make_event()
    monkeypatch.setattr(process_start.recorder, "role", "engine")
    engine_start = process_start.ProcessStartRecorder().make_event()
    assert server_start is not None and engine_start is not None
    assert server_start.parent_span_id == bytes(8)
    assert (engine_start.trace_id, engine_start.parent_span_id) == (
        server_start.trace_id,
        server_start.span_id,
    )
    assert engine_start.span_id != server_start.span_id


@pytest.mark.parametrize("inherited", ["", "nonsense", "ab" * 12])
def test_start_without_a_valid_parent_is_a_root(
    span_factory: None, monkeypatch: pytest.MonkeyPatch, inherited: str
) -> None:
    monkeypatch.setenv("OTEL_INFER_START", inherited)
    monkeypatch.setattr(process_start.recorder, "role", "engine")
    event = process_start.ProcessStartRecorder().make_event()
    assert event is not None and event.parent_span_id == bytes(8)


def test_mark_recorded_without_an_event_has_no_effect(span_factory: None) -> None:
    start_recorder = process_start.ProcessStartRecorder()
    start_recorder.mark_recorded()
    assert start_recorder.make_event() is not None


def test_interactive_interpreter_records_no_start(
    span_factory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert process_start.ProcessStartRecorder().make_event() is None


def test_in_process_start_is_exported_once_after_reinstrumenting() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    before = _clock.read_clocks()[1]
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, env=environ, check=True
    )
    spans: list[Any] = json.loads(done.stdout)
    (start,) = [span for span in spans if span[0] == "server start"]
    requests = [span for span in spans if span[0] == "chat tiny"]
    assert [span[3] for span in requests] == [[start[1]], []]
    assert before - 20_000_000 <= start[2] < requests[0][2]


def test_in_process_uncaught_exception_is_exported_before_exit() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, env=environ)
    assert "LookupError" in done.stderr
    assert json.loads(done.stdout) == ["server start", "LookupError"]


FAILING = """
import json
import otel_infer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otel_infer.ringbuffer.recorder import recorder

class Printing(SpanExporter):
    def export(self, spans):
        for span in spans:
            print(json.dumps([span.name, span.attributes["error.type"]]))

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Printing()))
otel_infer.instrument(tracer_provider=provider, integrations=("asgi",))
recorder.ensure_rings()  # as the import of an engine does
raise LookupError("must not appear in telemetry")
"""
