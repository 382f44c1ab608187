"""Traces every inference request with OpenTelemetry: every stage and every decode step, in one line of code.

    import otel_infer
    otel_infer.instrument()

Without a line of code: `otel-infer run -- python server.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from otel_infer.instrumentation.manual import batch, item, request, stage, step

__all__ = ["batch", "flush", "instrument", "item", "request", "stage", "step", "uninstrument"]


def instrument(*, tracer_provider: TracerProvider | None = None, integrations: tuple[str, ...] = ()) -> bool:
    """Installs hooks in the engines and servers that this process uses, now or when it imports them.

    Returns whether this call installed hooks; a second call installs none. Nothing is started before an
    engine is imported or a request arrives. Nothing is started at all unless an output is configured, for
    example an OTLP endpoint or `OTEL_INFER_ENABLED=on`.

    `tracer_provider`: spans are exported through this provider by a thread of this process, at a higher cost.
    `integrations`: the names of the integrations to install; empty = all. A bad setting raises no exception:
    it is reported in one line, and its default is used.
    """
    from otel_infer._bootstrap.install import installation

    return installation.instrument(tracer_provider, integrations)


def uninstrument() -> None:
    """Removes the installed hooks and sends what was recorded."""
    from otel_infer._bootstrap.install import installation

    installation.uninstrument()


def flush(timeout: float = 5.0) -> bool:
    """Sends everything recorded so far.

    Returns False if `timeout` seconds were not enough, or if a receiver refused something that was recorded
    since the last flush.
    """
    from otel_infer._bootstrap.install import installation

    return installation.flush(timeout)


def __getattr__(name: str) -> Any:
    """Imports the manual API on first use, because it imports OpenTelemetry's API."""
    if name in ("batch", "item", "request", "stage", "step"):
        from otel_infer.instrumentation import manual

        return getattr(manual, name)
    raise AttributeError(f"module 'otel_infer' has no attribute {name!r}")
