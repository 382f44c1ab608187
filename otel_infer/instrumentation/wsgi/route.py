"""Reads the route template of a request from the framework that found it: Flask, Quart, Django, Falcon.

A request may have come from an ASGI server: always to Quart, sometimes to Django and Falcon.

The path under which this process mounts an application is a part of it. A path that a header states is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY
from otel_infer.instrumentation.asgi.route import RouteTemplate
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.wsgi.exchange import ENVIRON_KEY


def register_hooks(instrumentor: Instrumentor) -> None:
    """Registers a hook per framework, on the function that finds the route."""
    for part, target, note_route in (
        ("flask", "flask.ctx:RequestContext.match_request", _note_flask_route),
        ("flask", "flask.ctx:AppContext.match_request", _note_flask_route),
        ("quart", "quart.ctx:_BaseRequestWebsocketContext.match_request", _note_quart_route),
        ("django", "django.core.handlers.base:BaseHandler.resolve_request", _note_django_route),
        ("falcon", "falcon.app:App._get_responder", _note_falcon_route),
    ):
        instrumentor.patch_hot_path(target, optional=True, part=part)(_make_hook(note_route))


def _make_hook(note_route: Callable[..., None]) -> Callable[..., Any]:
    """Returns a wrapper factory that calls `note_route(result, self, *args)` after the framework's function."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def find_and_note_route(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                if hook.alive:
                    note_route(result, self, *args)
            except BaseException as exc:
                hook.count_failure(exc)
            return result

        return find_and_note_route

    return make_wrapper


def _set_route(environ: Any, template: Any) -> None:
    exchange = environ.get(ENVIRON_KEY) if isinstance(environ, dict) else None
    if exchange is not None and isinstance(template, str):
        exchange.note_route(template)


def _set_asgi_route(request: Any, template: Any) -> None:
    """Sets the route of a request that an ASGI server received; does nothing for any other."""
    scope = getattr(request, "scope", None)
    exchange = scope.get(SCOPE_KEY) if isinstance(scope, dict) else None
    if exchange is not None and isinstance(template, str):
        exchange.route = RouteTemplate(template if template.startswith("/") else f"/{template}")


def _note_flask_route(result: Any, context: Any) -> None:
    rule = context.request.url_rule
    if rule is not None:
        _set_route(context.request.environ, rule.rule)


def _note_quart_route(result: Any, context: Any) -> None:
    request = context.request_websocket
    if request.url_rule is not None:
        _set_asgi_route(request, request.url_rule.rule)


def _note_django_route(match: Any, handler: Any, request: Any) -> None:
    _set_asgi_route(request, match.route)
    _set_route(getattr(request, "environ", None), match.route)


def _note_falcon_route(found: Any, app: Any, request: Any) -> None:
    _set_asgi_route(request, found[3])
    _set_route(getattr(request, "env", None), found[3])  # requests of ASGI servers have none
