"""Records HTTP requests of WSGI servers: their arrival, the response, and their outcome.

    server ─▶ application(environ, start_response) ─▶ body, read chunk by chunk ─▶ close

The application is wrapped as its server receives it: werkzeug, gunicorn's workers, waitress, wsgiref and gevent. Any other
server gets `wrap(app)`. Routes are read from Flask, Quart, Django and Falcon (`route`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.app_attribute import patch_app_attribute
from otel_infer.instrumentation.wsgi import route
from otel_infer.instrumentation.wsgi.exchange import App, Environ, WsgiExchange, begin_exchange
from otel_infer.instrumentation.wsgi.response_body import wrap_body
from otel_infer.instrumentation.wsgi.waitress_queue import patch_add_task

MODULES = (
    "werkzeug.serving",
    "gunicorn.workers.base",
    "waitress.server",
    "wsgiref.simple_server",
    "gevent.pywsgi",
    "flask",
    "quart.ctx",
    "django.core.handlers.base",
)
_WSGI_WORKERS = ("gunicorn.workers.sync", "gunicorn.workers.gthread", "gunicorn.workers.base_async")
"""Modules of gunicorn's workers that call a WSGI application. Other workers load an ASGI application by the same method."""

instrumentor = Instrumentor("wsgi", "werkzeug", MODULES)


def wrap(app: App) -> App:
    """Returns a WSGI application that records the requests of `app`, for a server that has no hooks.

    Wrapping an application twice records each request once.
    """
    return _wrap_app(app, Hook("otel_infer.instrumentation.wsgi:wrap"))


def _wrap_app(app: App, hook: Hook) -> App:
    def traced_app(environ: Environ, start_response: Callable[..., Any]) -> Any:
        exchange = begin_exchange(environ, hook)
        if exchange is None:
            return app(environ, start_response)
        return _call_app(app, exchange, environ, start_response)

    return traced_app


def _call_app(app: App, exchange: WsgiExchange, environ: Environ, start_response: Callable[..., Any]) -> Any:
    """Calls the application in the context of its request. The request ends with the returned body."""
    try:
        body = exchange.call(app, environ, exchange.follow_start(start_response))
    except BaseException as exc:
        exchange.end(exc)
        raise
    return wrap_body(body, exchange, environ)


def _is_wsgi_worker(worker: Any) -> bool:
    """Returns whether a worker of gunicorn calls a WSGI application."""
    return any(base.__module__ in _WSGI_WORKERS for base in type(worker).__mro__)


for _part, _target, _attribute in (
    ("werkzeug", "werkzeug.serving:BaseWSGIServer.__init__", "app"),
    ("waitress", "waitress.server:BaseWSGIServer.__init__", "application"),
    ("wsgiref", "wsgiref.simple_server:WSGIServer.set_app", "application"),
    ("gevent", "gevent.pywsgi:WSGIServer.__init__", "application"),
):
    instrumentor.patch_hot_path(_target, part=_part)(patch_app_attribute(_attribute, _wrap_app))
instrumentor.patch_hot_path("gunicorn.workers.base:Worker.load_wsgi", part="gunicorn")(
    patch_app_attribute("wsgi", _wrap_app, _is_wsgi_worker)
)
instrumentor.patch_hot_path(
    "waitress.server:BaseWSGIServer.add_task", reads=("task",), optional=True, part="waitress"
)(patch_add_task)
route.register_hooks(instrumentor)
