"""Finds the method, the scheme and the route template of an HTTP request, in fixed vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_infer.instrumentation.http_server.method import encode_method, to_known_names


class RouteTemplate(NamedTuple):
    """The template of a route of a framework whose routes have no `path_format`."""

    path_format: str


def encode_method_and_route(
    scope: Mapping[str, Any], route: Any, root_path: str, mount_path: str
) -> tuple[int, str]:
    """Returns method and scheme as one number, and the route template, as `events.ExchangeEnded` holds them."""
    http = encode_method(scope.get("method"), scope.get("scheme"))
    if route is not None and not mount_path and not root_path:  # nearly always; this saves a call
        path = getattr(route, "path_format", None)
        if type(path) is str:
            return http, path
    return http, _find_template(route, root_path, mount_path)


def find_method_scheme_and_route(
    scope: Mapping[str, Any], route: Any, root_path: str, mount_path: str
) -> tuple[str, str, str]:
    """Returns method, scheme and route template, as `events.HttpServed` holds them."""
    names = to_known_names(scope.get("method"), scope.get("scheme"))
    return *names, _find_template(route, root_path, mount_path)


def _find_template(route: Any, root_path: str, mount_path: str) -> str:
    """Returns the route template; "" if no route matched."""
    path = None
    if route is not None:
        path = getattr(route, "path_format", None) or getattr(route, "path", None)
    elif mount_path:
        path = "/{path}"
    return root_path.rstrip("/") + mount_path + path if isinstance(path, str) else ""
