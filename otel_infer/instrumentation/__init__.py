"""Instrumentation of engines, servers and libraries."""

from otel_infer.config.propagators import load_api

load_api()
