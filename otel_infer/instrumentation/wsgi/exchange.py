"""Records one HTTP request of a WSGI server, from the call of the application to the last byte of the response."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.exchange import HttpExchange
from otel_infer.instrumentation.http_server.server_exchange import can_record
from otel_infer.instrumentation.waits import record_wait
from otel_infer.instrumentation.wsgi.waitress_queue import QueuedTask, find_task
from otel_infer.ringbuffer import events
from otel_infer.tracing.context import detach
from otel_infer.tracing.header_reader import W3C_FIELDS

Environ = dict[str, Any]
App = Callable[..., Iterable[bytes]]
ENVIRON_KEY = "otel_infer.exchange"
_W3C_HEADERS = tuple((f"HTTP_{name.upper()}", name.encode()) for name in W3C_FIELDS)
"""The names of the W3C headers, in an environment and on the wire."""
_OTHERS = tuple(
    f"opentelemetry.instrumentation.{name}" for name in ("wsgi", "flask", "django", "falcon", "pyramid")
)
"""Instrumentations that start a SERVER span below the server's call of the application."""


def begin_exchange(environ: Environ, hook: Hook) -> WsgiExchange | None:
    """Returns the exchange that begins here; None if it is not recorded, or recorded already further out."""
    try:
        if ENVIRON_KEY in environ or not can_record(hook):
            return None
        exchange = environ[ENVIRON_KEY] = WsgiExchange(environ, hook)
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


def _read_length(headers: Any) -> int:
    """Returns the `Content-Length` of a response; 0 if it has none. `headers`: a list by PEP 3333.

    Anything else is for the server: an iterator would be empty once it is read here.
    """
    for name, value in headers if isinstance(headers, (list, tuple)) else ():
        if name.lower() == "content-length":
            return int(value) if value.isdecimal() else 0
    return 0


class WsgiExchange(HttpExchange):
    """One HTTP request of a WSGI server. `announced_length`: of the body, in bytes; 0 = unknown, or no body."""

    __slots__ = ("announced_length", "environ", "path", "prefix", "task")

    owner = "wsgi"

    def __init__(self, environ: Environ, hook: Hook) -> None:
        self.environ, self.announced_length = environ, 0
        self.path, self.prefix = str(environ.get("PATH_INFO", "")), str(environ.get("SCRIPT_NAME", ""))
        self.task: QueuedTask = find_task(environ)
        has_other_span = any(name in sys.modules for name in _OTHERS)
        method, scheme = environ.get("REQUEST_METHOD"), environ.get("wsgi.url_scheme")
        super().__init__(hook, method, scheme, has_other_span, self.task.put_at)
        if self.task.put_at and self.request is not None:
            record_wait(self.request, events.POOL_WAIT, self.task.put_at, self.task.threads)

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (name[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in self.environ.items()
            if name.startswith("HTTP_") and isinstance(value, str)
        ]

    def list_w3c_headers(self) -> list[tuple[bytes, bytes]]:
        values = [(name, self.environ.get(key)) for key, name in _W3C_HEADERS]
        return [
            (name, value.encode("latin-1", "replace")) for name, value in values if isinstance(value, str)
        ]

    def find_path(self) -> str:
        """Returns the path as the server has received it: a dispatcher moves its prefix to `SCRIPT_NAME`."""
        return self.path

    def note_route(self, template: str) -> None:
        """Notes the template that a framework has found, below the prefix under which this process mounts the application."""
        mounted = str(self.environ.get("SCRIPT_NAME", "")).removeprefix(self.prefix)
        if mounted and self._is_in_headers(mounted.strip("/")):
            mounted = ""
        self.route = f"{mounted}{template if template.startswith('/') else f'/{template}'}"

    def _is_in_headers(self, text: str) -> bool:
        """Returns whether a header has this path: a client may have sent it, so it must not leave the process."""
        values = [str(value) for name, value in self.environ.items() if name.startswith("HTTP_")]
        return any(part.strip(" /") == text for value in values for part in value.split(","))

    def find_address(self) -> Any:
        port = str(self.environ.get("SERVER_PORT", ""))
        return self.environ.get("SERVER_NAME"), int(port) if port.isdecimal() else 0

    def find_socket(self) -> Any:
        return self.environ.get("gunicorn.socket") or self.environ.get("werkzeug.socket") or self.task.socket

    def has_client_left(self, exc: BaseException | None) -> bool:
        """Returns whether the server stopped reading the body of the response."""
        is_unread = exc is None and self.status > 0 and not self.completed_at
        return is_unread or isinstance(exc, GeneratorExit)

    def call(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Calls a function of the application in the context of its request.

        While it runs, the sidecar finds this thread if the request is late.
        """
        token = self.attach()
        try:
            return function(*args) if self.request is None else self.request.call_in_thread(function, *args)
        finally:
            if token is not None:
                detach(token)

    def follow_start(self, start_response: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the server's `start_response`, which notes status and length on the way."""

        def start_and_follow(status: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                code = status[:3] if isinstance(status, str) else ""
                self.record_start(int(code) if code.isdigit() else 0)
                self.announced_length = _read_length(args[0]) if args else 0
            except BaseException as exc:
                self._hook.count_failure(exc)
            return start_response(status, *args, **kwargs)

        return start_and_follow

    def end(self, exc: BaseException | None = None) -> None:
        """Ends the request, once. `exc`: the exception that left the application or its body, or None."""
        self.environ.pop(ENVIRON_KEY, None)
        super().end(exc)
