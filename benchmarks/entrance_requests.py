"""Measures the CPU time that a request of Flask or gRPC adds to the server: otel_infer against OpenTelemetry's instrumentations.

Both make the same SERVER span, and export it by OTLP. WSGI applications and gRPC handlers are called directly, as a server
calls them, so that its own varying work is left out. CPU time is of the whole process, with contrib's exporting thread. Needs
`.venv-servers`.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.asgi_requests import (
    AGAIN,
    BARE,
    FACTOR,
    OURS,
    THEIRS,
    WARM_UP,
    RequestCosts,
    Size,
    divide_costs,
    measure_rounds,
)
from benchmarks.asgi_systems import System, do_nothing
from benchmarks.ours import Exporting
from benchmarks.paced_client import BODY, HEADERS
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock
from benchmarks.verdict import Gate, Line, estimate_median, make_control, make_exact, make_line, relax_control
from otel_infer import semconv

METHOD = "/answers.Answers/Answer"


class Entrance(NamedTuple):
    """A kind of server. `make_systems`: bare, ours and contrib's; `call`: serves one request of a system."""

    title: str
    make_systems: Callable[[Stock], list[System]]
    call: Callable[[Any], Any]


def measure(quick: bool) -> list[Line]:
    """Returns the rows of the table."""
    size = Size(40, 3) if quick else Size(300, 40)
    lines: list[Line] = []
    expected = 0
    with Receiver() as receiver, Exporting(receiver.endpoint) as exporting:
        mine, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        machine.pin_process(os.getpid(), mine)
        for entrance in ENTRANCES:
            stock = Stock(receiver.endpoint)
            systems = entrance.make_systems(stock)

            async def send(system: System, path: str, requests: int, call: Any = entrance.call) -> None:
                for _ in range(requests):
                    call(system.app)

            asyncio.run(measure_rounds(systems, send, "", Size(size.requests, 1), exporting, send))
            costs = asyncio.run(measure_rounds(systems, send, "", size, exporting, send))
            expected += (WARM_UP + size.requests) * (size.rounds + 1)
            lines += _make_lines(entrance.title, costs)
            stock.close()
        exporting.flush()
        arrived = receiver.read_counts()
    lines.append(_make_span_line(arrived, expected))
    return lines


def _make_lines(title: str, costs: RequestCosts) -> list[Line]:
    server = {name: np.asarray(column) for name, column in costs.server.items()}
    usual = (server[BARE] + server[AGAIN]) / 2
    ours, theirs = server[OURS] - usual, server[THEIRS] - usual
    gate = Gate(FACTOR, at_least=True)
    difference = abs(estimate_median(server[AGAIN] - server[BARE]).value)
    control = make_control(estimate_median(server[AGAIN] / server[BARE] - 1))
    control = relax_control(control, divide_costs(theirs, ours + difference), gate)
    note = f"uninstrumented {estimate_median(usual).value / 1000:.0f} µs, contrib {estimate_median(theirs).value / 1000:.0f} µs"
    return [
        make_line(
            f"{title} request: below contrib, server", "×", divide_costs(theirs, ours), gate, control, note
        ),
        make_line(
            f"{title} request: below contrib, sidecar and server",
            "×",
            divide_costs(theirs, ours + costs.sidecar),
        ),
        make_line(f"{title} request: server", "µs", estimate_median(ours).scale_by(1 / 1000)),
        make_line(f"{title} request: sidecar", "µs", make_exact(costs.sidecar / 1000)),
    ]


def _make_span_line(arrived: dict[str, Any], expected: int) -> Line:
    ours, doubled = arrived["servers"].get(semconv.SCOPE, 0), arrived["spans"] - arrived["unique"]
    note = f"{expected:,} expected, {ours:,} arrived"
    wrong = make_exact(float(abs(expected - ours) + doubled))
    return make_line(
        "Flask and gRPC requests: SERVER spans lost or doubled, ours", "", wrong, Gate(0), note=note
    )


# ── Flask ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_flask() -> Any:
    """Returns an application with one route."""
    import flask

    app = flask.Flask(__name__)

    @app.post("/answers")
    def answers() -> dict[str, Any]:
        return {"id": flask.request.get_json()["id"], "text": "Because of the air."}

    return app


def _make_flask_systems(stock: Stock) -> list[System]:
    from opentelemetry.instrumentation.flask import FlaskInstrumentor

    from otel_infer.instrumentation import wsgi

    theirs = make_flask()
    FlaskInstrumentor().instrument_app(theirs, tracer_provider=stock.provider)
    install, remove = wsgi.instrumentor.install, wsgi.instrumentor.remove
    return [
        System(BARE, make_flask(), do_nothing, do_nothing, do_nothing),
        System(OURS, wsgi.wrap(make_flask()), install, remove, do_nothing),
        System(THEIRS, theirs, do_nothing, do_nothing, stock.flush),
    ]


def _call_wsgi(app: Any) -> None:
    environ = {
        "REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": "/answers", "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1", "SERVER_PORT": "8000", "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(BODY)), "HTTP_HOST": "127.0.0.1:8000",
        "HTTP_USER_AGENT": "client/1.0", "HTTP_ACCEPT": "*/*", "HTTP_TRACEPARENT": HEADERS["traceparent"],
        "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(BODY),
        "wsgi.errors": io.StringIO(), "wsgi.multithread": True, "wsgi.multiprocess": False, "wsgi.run_once": False,
    }  # fmt: skip
    body = app(environ, _start_response)
    try:
        for _ in body:
            pass
    finally:
        body.close()


def _start_response(status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
    if not status.startswith("200"):
        raise RuntimeError(status)
    return lambda data: None


# ── gRPC ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Metadatum(NamedTuple):
    """A pair of a call's metadata, as gRPC has it."""

    key: str
    value: str


class _Call(NamedTuple):
    """What a gRPC server tells its interceptors of a call."""

    method: str = METHOD
    invocation_metadata: tuple[_Metadatum, ...] = (
        _Metadatum("traceparent", HEADERS["traceparent"]),
        _Metadatum("user-agent", "grpc-python/1.85"),
    )


class _Context:
    """What a handler sees of its call."""

    def invocation_metadata(self) -> Any:
        return _Call().invocation_metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    def code(self) -> None:
        return None

    def is_active(self) -> bool:
        return True


def _answer(request: bytes, context: Any) -> bytes:
    return json.dumps({"id": json.loads(request)["id"], "text": "Because of the air."}).encode()


def _make_grpc_systems(stock: Stock) -> list[System]:
    import grpc
    from opentelemetry.instrumentation.grpc import server_interceptor

    from otel_infer.instrumentation.grpc import RpcInterceptor
    from otel_infer.instrumentation.hooks.probe import Hook

    handler = grpc.unary_unary_rpc_method_handler(_answer)

    def bare(details: _Call) -> Any:
        return handler

    def intercept(interceptor: Any) -> Callable[[_Call], Any]:
        return lambda details: interceptor.intercept_service(bare, details)

    ours = RpcInterceptor(Hook("benchmarks"), (), 4)
    return [
        System(BARE, bare, do_nothing, do_nothing, do_nothing),
        System(OURS, intercept(ours), do_nothing, do_nothing, do_nothing),
        System(THEIRS, intercept(server_interceptor(stock.provider)), do_nothing, do_nothing, stock.flush),
    ]


def _call_grpc(serve: Any) -> None:
    handler = serve(_Call())
    response = handler.unary_unary(BODY, _Context())
    if handler.response_serializer is not None:
        handler.response_serializer(response)


ENTRANCES = (
    Entrance("Flask", _make_flask_systems, _call_wsgi),
    Entrance("gRPC", _make_grpc_systems, _call_grpc),
)
