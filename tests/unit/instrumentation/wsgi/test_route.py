"""Routes of frameworks behind an ASGI server, read from stand-ins for their requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY
from otel_infer.instrumentation.wsgi import route


def note_quart(scope: Any, template: Any) -> None:
    rule = None if template is None else SimpleNamespace(rule=template)
    context = SimpleNamespace(request_websocket=SimpleNamespace(url_rule=rule, scope=scope))
    route._note_quart_route(None, context)


def note_falcon(scope: Any, template: Any) -> None:
    class Request:
        """Like a request of `falcon.asgi`."""

        def __init__(self) -> None:
            self.scope = scope

        @property
        def env(self) -> Any:
            raise AttributeError("not available in ASGI")

    route._note_falcon_route((None, {}, None, template), None, Request())


@pytest.mark.parametrize("note", [note_quart, note_falcon])
def test_the_route_of_a_request_of_an_asgi_server_is_noted(note: Any) -> None:
    exchange = SimpleNamespace(route=None)
    note({SCOPE_KEY: exchange}, "/predict/<name>")
    assert exchange.route.path_format == "/predict/<name>"


@pytest.mark.parametrize("note", [note_quart, note_falcon])
@pytest.mark.parametrize("exchange", [None, SimpleNamespace(route=None)], ids=["not recorded", "no match"])
def test_a_request_without_exchange_or_route_is_left_alone(note: Any, exchange: Any) -> None:
    note({SCOPE_KEY: exchange} if exchange is not None else {}, None)
    assert exchange is None or exchange.route is None
