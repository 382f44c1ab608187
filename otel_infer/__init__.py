"""Every stage of every inference request as an OpenTelemetry trace, every decode step included, in one line.

    import otel_infer
    otel_infer.instrument()

Without a line of code: `otel-infer run -- python server.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from otel_infer.instrumentation.manual import request, stage, step

__all__ = ["flush", "instrument", "request", "stage", "step", "uninstrument"]


def instrument(*, tracer_provider: TracerProvider | None = None, integrations: tuple[str, ...] = ()) -> bool:
    """Binds to the engines and servers that this process uses, now or when it imports them.

    Nothing is started before an engine is imported or a request arrives, and nothing at all unless something is to be
    exported (to an OTLP endpoint, say, or since `OTEL_INFER_ENABLED=on`). With `tracer_provider`, spans go to that provider from a
    thread of this process (costlier). `integrations` limits what is bound, by name. Calling it twice is once; returns
    whether this call did anything. Never raises for a bad setting: it says so in one line and uses the default.
    """
    from otel_infer._bootstrap.install import installation

    return installation.instrument(tracer_provider, integrations)


def uninstrument() -> None:
    """Takes off what is still ours; what was recorded is sent."""
    from otel_infer._bootstrap.install import installation

    installation.uninstrument()


def flush(timeout: float = 5.0) -> bool:
    """Has everything recorded so far sent; False if `timeout` seconds were not enough."""
    from otel_infer._bootstrap.install import installation

    return installation.flush(timeout)


def __getattr__(name: str) -> Any:
    """`stage`, `request` and `step` load OpenTelemetry's API, so they are imported when first used."""
    if name in ("request", "stage", "step"):
        from otel_infer.instrumentation import manual

        return getattr(manual, name)
    raise AttributeError(f"module 'otel_infer' has no attribute {name!r}")
