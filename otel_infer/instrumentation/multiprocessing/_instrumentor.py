"""The instrumentor of the standard library's processes."""

from __future__ import annotations

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

instrumentor = Instrumentor(
    "multiprocessing", "python", ("multiprocessing.process", "concurrent.futures.process")
)
