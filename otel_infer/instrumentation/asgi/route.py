"""What was asked for over HTTP, in words of ours: method, scheme, and the route with the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_infer.ringbuffer import events


def encode_method_and_route(scope: Mapping[str, Any], route: Any, root: str, mounted: str) -> tuple[int, str]:
    """As `facts.ExchangeEnded` has it: method and scheme as one number, and the route; empty if there was none."""
    path = None
    if route is not None:
        path = getattr(route, "path_format", None) or getattr(route, "path", None)
    elif mounted:
        path = "/{path}"
    template = root.rstrip("/") + mounted + path if isinstance(path, str) else ""
    method: Any = scope.get("method")
    scheme: Any = scope.get("scheme")
    http = events.HTTP_CODES.get((method, scheme))
    if http is None:
        known = method if method in events.METHODS else events.OTHER
        http = events.HTTP_CODES[known, scheme if scheme in events.SCHEMES else ""]
    return http, template
