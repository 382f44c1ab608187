"""How a process began is told once, by whoever is a server, and never by a wheel that lies in an environment."""

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
said = [[s.name, s.context.span_id, s.start_time, [l.context.span_id for l in s.links]] for s in exporter.get_finished_spans()]
print(json.dumps(said))
"""


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = span_ids.SdkSpanFactory(ALWAYS_OFF, RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", ids)


def test_it_is_the_same_however_often_it_is_asked_until_somebody_knows(opener: None) -> None:
    born = process_start.ProcessStartRecorder()
    told = born.make_event()
    assert told is not None and told == born.make_event()
    assert any(told.trace_id) and any(told.span_id)
    assert told.at <= _clock.now()
    now, wall = _clock.read_clocks()
    assert abs((wall - now) - (told.wall_at - told.at)) < 1_000_000_000
    born.mark_recorded()
    assert born.make_event() is None


def test_a_process_that_a_server_started_for_its_engine_begins_in_the_servers_start(
    opener: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_INFER_START", "")  # for it to be taken back
    monkeypatch.setattr(process_start.recorder, "role", process_start.SERVER)
    servers = process_start.ProcessStartRecorder().make_event()
    monkeypatch.setattr(process_start.recorder, "role", "engine")
    engines = process_start.ProcessStartRecorder().make_event()
    assert servers is not None and engines is not None
    assert servers.parent_span_id == bytes(8)
    assert (engines.trace_id, engines.parent_span_id) == (servers.trace_id, servers.span_id)
    assert engines.span_id != servers.span_id


@pytest.mark.parametrize("left", ["", "nonsense", "ab" * 12])
def test_where_no_server_left_its_start_it_is_one_of_its_own(
    opener: None, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setenv("OTEL_INFER_START", left)
    monkeypatch.setattr(process_start.recorder, "role", "engine")
    told = process_start.ProcessStartRecorder().make_event()
    assert told is not None and told.parent_span_id == bytes(8)


def test_who_was_never_asked_has_told_nobody(opener: None) -> None:
    born = process_start.ProcessStartRecorder()
    born.mark_recorded()
    assert born.make_event() is not None


def test_an_interactive_interpreter_starts_no_server(opener: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert process_start.ProcessStartRecorder().make_event() is None


def test_in_process_a_start_is_told_once_though_we_come_twice() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    before = _clock.read_clocks()[1]
    ran = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, env=kept, check=True)
    said: list[Any] = json.loads(ran.stdout)
    (start,) = [span for span in said if span[0] == "server start"]
    requests = [span for span in said if span[0] == "chat tiny"]
    assert [span[3] for span in requests] == [[start[1]], []]
    assert before - 20_000_000 <= start[2] < requests[0][2]


def test_in_process_an_exception_that_nobody_caught_is_told_before_it_is_over() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ran = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, env=kept)
    assert "LookupError" in ran.stderr
    assert json.loads(ran.stdout) == ["server start", "LookupError"]


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
raise LookupError("what no telemetry may show")
"""
