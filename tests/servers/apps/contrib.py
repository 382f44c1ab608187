"""Runs an application of these tests beside OpenTelemetry's own instrumentation: `… contrib NAME PORT MORE…`.

With `ours_last` in MORE, that instrumentation is started before otel-infer's.
"""

from __future__ import annotations

import importlib
import runpy
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import otel_infer

INSTRUMENTORS = {
    "flask_app": ("flask:FlaskInstrumentor",),
    "falcon_app": ("falcon:FalconInstrumentor",),
    "aiohttp_app": ("aiohttp_server:AioHttpServerInstrumentor",),
    "tornado_app": ("tornado:TornadoInstrumentor",),
    "grpc_app": ("grpc:GrpcInstrumentorServer", "grpc:GrpcAioInstrumentorServer"),
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    for target in INSTRUMENTORS[name]:
        module, _, class_name = target.partition(":")
        getattr(importlib.import_module(f"opentelemetry.instrumentation.{module}"), class_name)().instrument()
    if "ours_last" in arguments:
        otel_infer.instrument()
    sys.argv = [name, *arguments]
    runpy.run_module(f"tests.servers.apps.{name}", run_name="__main__")
