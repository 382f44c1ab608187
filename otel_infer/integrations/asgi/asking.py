"""Who asks, where the operator wants it known: tenant and traffic class, stated when the request arrives.

Nothing is read of a request unless it is configured, and then only the one header or baggage entry that was named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import baggage
from opentelemetry.context import Context

from otel_infer import callers
from otel_infer.ingress import LiveRequest

wanted = callers.NOTHING
"""Set by `configure`."""


def tell(request: LiveRequest, scope: Mapping[str, Any], around: Context | None) -> None:
    """States what is wanted; the caller's baggage is in `around`, or in the current context."""
    if wanted.tenant is None and wanted.traffic is None:
        return
    headers, named = scope.get("headers") or (), ""
    if wanted.traffic is not None:
        said = _header(headers, wanted.traffic.header) if wanted.traffic.header else None
        named = wanted.traffic.of(said, str(scope.get("path", "")))
    request.asked(callers.told(_tenant(headers, around), wanted.key), named)


def _tenant(headers: Iterable[tuple[bytes, bytes]], around: Context | None) -> str:
    if wanted.tenant is None:
        return ""
    if wanted.tenant.kind == callers.HEADER:
        return (_header(headers, wanted.tenant.name) or "").strip()
    if wanted.tenant.kind == callers.BAGGAGE:
        value = baggage.get_baggage(wanted.tenant.name, around)
        return value.strip() if isinstance(value, str) else ""
    return ""


def _header(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    """The first of this name, as applications are given it."""
    wire = name.encode()
    return next((value.decode("utf-8", "replace") for key, value in headers if key.lower() == wire), None)
