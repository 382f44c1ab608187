"""How `opentelemetry-instrument` finds us: the entry point `otel_infer` of the group `opentelemetry_instrumentor`.

Only that command loads this module, and it brings `opentelemetry-instrumentation` along.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

import otel_infer


class OtelInferInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Instruments all engines; none of them has to be installed, so it depends on none."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Engines are looked for when they are imported."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        otel_infer.instrument(tracer_provider=kwargs.get("tracer_provider"))

    def _uninstrument(self, **kwargs: Any) -> None:
        otel_infer.uninstrument()
