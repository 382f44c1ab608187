"""Who asks, where the operator wants it known: tenant and traffic class, stated when the request arrives, or when its adapter is known.

Nothing is read of a request unless it is configured, and then only the one header or baggage entry that was named.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import baggage
from opentelemetry.context import Context

from otel_infer.config import tenancy
from otel_infer.tracing.request_span import RequestSpan

Headers = Iterable[tuple[bytes, bytes]]

caller_settings = tenancy.NO_CALLER_SETTINGS
"""Set once the settings are known."""


def record_caller(request: RequestSpan, headers: Headers, path: str = "") -> None:
    """States what is wanted; the caller's baggage is in what the request was opened in. `headers`: as on the wire."""
    if caller_settings.tenant_source is None and caller_settings.traffic_rules is None:
        return
    named = ""
    if caller_settings.traffic_rules is not None:
        said = (
            _find_header(headers, caller_settings.traffic_rules.header)
            if caller_settings.traffic_rules.header
            else None
        )
        named = caller_settings.traffic_rules.classify_request(said, path)
    request.set_caller(
        tenancy.sanitize_tenant(_read_tenant(headers, request.around), caller_settings.tenant_hash_key), named
    )


def record_adapter_tenant(request: RequestSpan, name: str) -> None:
    """The request asked for this LoRA adapter: its tenant, where that is how tenants are told apart."""
    if (
        caller_settings.tenant_source is not None
        and caller_settings.tenant_source.kind == tenancy.LORA
        and name
    ):
        request.set_caller(tenancy.sanitize_tenant(name, caller_settings.tenant_hash_key), "")


def _read_tenant(headers: Headers, around: Context) -> str:
    if caller_settings.tenant_source is None:
        return ""
    if caller_settings.tenant_source.kind == tenancy.HEADER:
        return (_find_header(headers, caller_settings.tenant_source.name) or "").strip()
    if caller_settings.tenant_source.kind == tenancy.BAGGAGE:
        value = baggage.get_baggage(caller_settings.tenant_source.name, around)
        return value.strip() if isinstance(value, str) else ""
    return ""


def _find_header(headers: Headers, name: str) -> str | None:
    """The first of this name, as applications are given it."""
    wire = name.encode()
    return next((value.decode("utf-8", "replace") for key, value in headers if key.lower() == wire), None)
