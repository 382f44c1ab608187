"""Who asks, where the operator wants it known: tenant and traffic class, stated when the request arrives, or when its adapter is known.

Nothing is read of a request unless it is configured, and then only the one header or baggage entry that was named.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import baggage
from opentelemetry.context import Context

from otel_infer.config import tenancy
from otel_infer.tracing.request_span import LiveRequest

Headers = Iterable[tuple[bytes, bytes]]

wanted = tenancy.NOTHING
"""Set once the settings are known."""


def tell(request: LiveRequest, headers: Headers, path: str = "") -> None:
    """States what is wanted; the caller's baggage is in what the request was opened in. `headers`: as on the wire."""
    if wanted.tenant is None and wanted.traffic is None:
        return
    named = ""
    if wanted.traffic is not None:
        said = _header(headers, wanted.traffic.header) if wanted.traffic.header else None
        named = wanted.traffic.of(said, path)
    request.asked(tenancy.told(_tenant(headers, request.around), wanted.key), named)


def by_adapter(request: LiveRequest, name: str) -> None:
    """The request asked for this LoRA adapter: its tenant, where that is how tenants are told apart."""
    if wanted.tenant is not None and wanted.tenant.kind == tenancy.LORA and name:
        request.asked(tenancy.told(name, wanted.key), "")


def _tenant(headers: Headers, around: Context) -> str:
    if wanted.tenant is None:
        return ""
    if wanted.tenant.kind == tenancy.HEADER:
        return (_header(headers, wanted.tenant.name) or "").strip()
    if wanted.tenant.kind == tenancy.BAGGAGE:
        value = baggage.get_baggage(wanted.tenant.name, around)
        return value.strip() if isinstance(value, str) else ""
    return ""


def _header(headers: Headers, name: str) -> str | None:
    """The first of this name, as applications are given it."""
    wire = name.encode()
    return next((value.decode("utf-8", "replace") for key, value in headers if key.lower() == wire), None)
