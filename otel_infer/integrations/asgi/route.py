"""What was asked for over HTTP, in words of ours: method, scheme, and the route with the names of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_infer import facts

if TYPE_CHECKING:
    from otel_infer.integrations.asgi.exchange import Exchange


def asked(exchange: Exchange) -> tuple[int, str]:
    """As `facts.ExchangeEnded` has it: method and scheme as one number, and the route; empty if there was none."""
    route, path = exchange.route, None
    if route is not None:
        path = getattr(route, "path_format", None) or getattr(route, "path", None)
    elif exchange.mounted:
        path = "/{path}"
    template = exchange.root.rstrip("/") + exchange.mounted + path if isinstance(path, str) else ""
    method: Any = exchange.scope.get("method")
    scheme: Any = exchange.scope.get("scheme")
    http = facts.HTTP.get((method, scheme))
    if http is None:
        known = method if method in facts.METHODS else facts.OTHER
        http = facts.HTTP[known, scheme if scheme in facts.SCHEMES else ""]
    return http, template
