"""Runs an application of these tests while our own code fails: `… broken PLACE NAME PORT MORE…`.

PLACE: a method of `ServerExchange` that raises from then on, or `uninstrument`.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any, NoReturn

import otel_infer
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange

PLACES = ("__init__", "open_request", "_record_chunk", "close_request", "uninstrument")


def fail(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("of our own")


def break_class(owner: type, place: str) -> None:
    """Makes a method raise, wherever a subclass defines it."""
    setattr(owner, place, fail)
    for subclass in owner.__subclasses__():
        if place in subclass.__dict__:
            setattr(subclass, place, fail)
        break_class(subclass, place)


if __name__ == "__main__":
    place, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    if place == "uninstrument":
        otel_infer.uninstrument()
    else:
        import otel_infer.instrumentation.aiohttp
        import otel_infer.instrumentation.grpc
        import otel_infer.instrumentation.sanic
        import otel_infer.instrumentation.tornado
        import otel_infer.instrumentation.wsgi

        break_class(ServerExchange, place)
    runpy.run_module(f"tests.servers.apps.{name}", run_name="__main__")
