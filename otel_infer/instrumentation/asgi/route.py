"""Encodes the method, the scheme and the route template of an HTTP request for its end event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_infer.ringbuffer import events


def encode_method_and_route(
    scope: Mapping[str, Any], route: Any, root_path: str, mount_path: str
) -> tuple[int, str]:
    """Returns method and scheme as one number, and the route template, as `events.ExchangeEnded` holds them.

    The template is "" if no route matched. A method outside `events.METHODS` is encoded as `events.OTHER`.
    """
    path = None
    if route is not None:
        path = getattr(route, "path_format", None) or getattr(route, "path", None)
    elif mount_path:
        path = "/{path}"
    template = root_path.rstrip("/") + mount_path + path if isinstance(path, str) else ""
    method: Any = scope.get("method")
    scheme: Any = scope.get("scheme")
    http = events.HTTP_CODES.get((method, scheme))
    if http is None:
        known_method = method if method in events.METHODS else events.OTHER
        http = events.HTTP_CODES[known_method, scheme if scheme in events.SCHEMES else ""]
    return http, template
