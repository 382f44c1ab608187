"""Records the tenant and traffic class of a request, when it arrives or when its LoRA adapter is known.

Nothing is read from a request unless it is configured, and then only the configured header or baggage entry.
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
    """Records the configured attributes of the caller.

    `headers`: as on the wire. The caller's baggage is read from the context that the request was opened in.
    """
    if caller_settings.tenant_source is None and caller_settings.traffic_rules is None:
        return
    traffic_class = ""
    if caller_settings.traffic_rules is not None:
        value = (
            _find_header(headers, caller_settings.traffic_rules.header)
            if caller_settings.traffic_rules.header
            else None
        )
        traffic_class = caller_settings.traffic_rules.classify_request(value, path)
    request.set_caller(
        tenancy.sanitize_tenant(_read_tenant(headers, request.around), caller_settings.tenant_hash_key),
        traffic_class,
    )


def record_adapter_tenant(request: RequestSpan, name: str) -> None:
    """Records the request's LoRA adapter as its tenant, where tenants are configured as adapters."""
    if (
        caller_settings.tenant_source is not None
        and caller_settings.tenant_source.kind == tenancy.LORA
        and name
    ):
        request.set_caller(tenancy.sanitize_tenant(name, caller_settings.tenant_hash_key), "")


def _read_tenant(headers: Headers, context: Context) -> str:
    if caller_settings.tenant_source is None:
        return ""
    if caller_settings.tenant_source.kind == tenancy.HEADER:
        return (_find_header(headers, caller_settings.tenant_source.name) or "").strip()
    if caller_settings.tenant_source.kind == tenancy.BAGGAGE:
        value = baggage.get_baggage(caller_settings.tenant_source.name, context)
        return value.strip() if isinstance(value, str) else ""
    return ""


def _find_header(headers: Headers, name: str) -> str | None:
    """Returns the first header of this name, as applications get it; None if there is none."""
    wire = name.encode()
    return next((value.decode("utf-8", "replace") for key, value in headers if key.lower() == wire), None)
