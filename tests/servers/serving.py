"""The servers of these tests: how each is started, and the routes that its framework states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from tests.servers.leftovers import MARKER, kill_leftovers
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port

APPS = "tests.servers.apps"


class ServedApp(NamedTuple):
    """A server with an application. `command`: after the interpreter, with `{port}`. `route`: of `/classify/a`.

    `error_type`: of `/fail`, which raises a RuntimeError; some frameworks do not show the exception. `address`: as the
    server states it.
    """

    command: tuple[str, ...]
    route: str
    error_type: str = "RuntimeError"
    address: str | None = "127.0.0.1"


def _module(name: str) -> tuple[str, ...]:
    return "-m", f"{APPS}.{name}", "{port}"


def _gunicorn(app: str, *options: str) -> tuple[str, ...]:
    return "-m", "gunicorn", "-b", "127.0.0.1:{port}", *options, f"{APPS}.{app}"


def _uvicorn(app: str) -> tuple[str, ...]:
    return "-m", "uvicorn", "--port", "{port}", "--log-level", "warning", f"{APPS}.{app}"


HIDDEN = "500"
"""The framework answers an exception itself, so the status is all that is seen."""
FLASK_ROUTE, DJANGO_ROUTE = "/classify/<name>", "/classify/<str:name>"
SERVERS = {
    "flask, werkzeug": ServedApp(_module("flask_app"), FLASK_ROUTE, HIDDEN),
    "flask, gunicorn sync": ServedApp(_gunicorn("flask_app:app"), FLASK_ROUTE, HIDDEN),
    "flask, gunicorn gthread": ServedApp(_gunicorn("flask_app:app", "--threads", "4"), FLASK_ROUTE, HIDDEN),
    "flask, gunicorn gevent": ServedApp(_gunicorn("flask_app:app", "-k", "gevent"), FLASK_ROUTE, HIDDEN),
    "flask, waitress": ServedApp(
        ("-m", "waitress", "--listen", "127.0.0.1:{port}", f"{APPS}.flask_app:app"), FLASK_ROUTE, HIDDEN, None
    ),
    "django, gunicorn sync": ServedApp(_gunicorn("django_app:wsgi"), DJANGO_ROUTE, HIDDEN),
    "django, uvicorn": ServedApp(_uvicorn("django_app:asgi"), DJANGO_ROUTE, HIDDEN),
    "falcon, wsgiref": ServedApp(_module("falcon_app"), "/classify/{name}", HIDDEN, "localhost"),
    "falcon, uvicorn": ServedApp(_uvicorn("falcon_asgi_app:app"), "/classify/{name}", HIDDEN),
    "falcon, hypercorn": ServedApp(
        ("-m", "hypercorn", "-b", "127.0.0.1:{port}", f"{APPS}.falcon_asgi_app:app"),
        "/classify/{name}",
        HIDDEN,
    ),
    "litestar, uvicorn": ServedApp(_uvicorn("litestar_app:app"), "/classify/{name}", HIDDEN),
    "aiohttp": ServedApp(_module("aiohttp_app"), "/classify/{name}"),
    "tornado": ServedApp(_module("tornado_app"), "/classify/([a-z]+)"),
    "sanic": ServedApp(_module("sanic_app"), "/classify/<name:str>"),
    "sanic, uvicorn": ServedApp(_uvicorn("sanic_app:app"), "/classify/<name:str>", HIDDEN),
}
"""By name."""


def make_command(app: ServedApp, port: int) -> list[str]:
    """Returns the command under `otel-infer run`."""
    own = [part.format(port=port) if "{port}" in part else part for part in app.command]
    return [sys.executable, "-m", "otel_infer", "run", "--", sys.executable, *own]


def start_module(
    name: str, receiver: OtlpReceiver, log: Path, path: str = "/health", **variables: str
) -> Server:
    """Starts an application of `APPS` that is run as a module with its port, under `otel-infer run`."""
    return start_command(_module(name), receiver, log, path, **variables)


def start_command(
    command: tuple[str, ...], receiver: OtlpReceiver, log: Path, path: str, **variables: str
) -> Server:
    """Starts what `ServedApp.command` states, under `otel-infer run`. `stop_module` stops it."""
    port = free_port()
    environ = {
        **receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(Path.cwd()), MARKER: str(port),
        **variables,
    }  # fmt: skip
    return Server(make_command(ServedApp(command, ""), port), port, log, environ, path).start()


def stop_module(server: Server) -> None:
    """Stops it, with the processes that it leaves behind. No hook of ours may have failed."""
    server.stop()
    kill_leftovers(str(server.port))
    assert "hook on" not in server.read_log()
