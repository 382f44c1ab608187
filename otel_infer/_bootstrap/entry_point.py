"""Provides the entry point `otel_infer` of `opentelemetry_instrumentor`, for `opentelemetry-instrument`.

Only that command loads this module, and it depends on `opentelemetry-instrumentation` itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

import otel_infer


class OtelInferInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Instrumentor of all engines. It depends on no engine, because none has to be installed."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Returns no dependencies: hooks are installed when an engine is imported."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        otel_infer.instrument(tracer_provider=kwargs.get("tracer_provider"))

    def _uninstrument(self, **kwargs: Any) -> None:
        otel_infer.uninstrument()
