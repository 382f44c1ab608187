"""The place where a server calls an application, and what earlier requests showed about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_infer.instrumentation.http_server.parent_context import Tokens
from otel_infer.ringbuffer.native import native


class PythonEntryPoint:
    """The fields that compiled code reads and writes as well."""

    has_tracer: bool = False
    reached_app: bool = False
    is_watched: bool = False
    app: Any = None
    call_slowly: Any = None
    hook: Any = None
    plain: Any = None


INSTRUMENTED_ATTRIBUTE = "_is_instrumented_by_opentelemetry"
"""OpenTelemetry's instrumentations of FastAPI and Starlette set it on the application."""

if TYPE_CHECKING or native is None:
    EntryPoint = PythonEntryPoint
else:
    EntryPoint = native.EntryPoint


class AsgiEntryPoint(EntryPoint):
    """An entry point. Where it is compiled, it is also the application that the server calls.

    `reached_app`: an application that we patch is behind it. `has_tracer`: another instrumentation starts a
    span in between, or in the application. `is_watched`: a timer measures the lag of its event loop.
    """

    deferred = False

    def enter_application(self, app: Any) -> Tokens:
        """Stores that the lifespan, or the first request, reached an application that we patch."""
        self.reached_app = True
        # An application may be instrumented with a provider of its own, which is not the global one.
        self.has_tracer = self.has_tracer or bool(getattr(app, INSTRUMENTED_ATTRIBUTE, False))
        return ()

    def record_route_error(self, exc: BaseException) -> None:
        """Does nothing: `Lifespan` records a failed lifespan."""
