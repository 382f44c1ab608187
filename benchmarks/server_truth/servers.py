"""The servers, and which of their stages can be delayed."""

from __future__ import annotations

import sys
from typing import NamedTuple

PROGRAMS = "benchmarks.server_truth.programs"
CALL = ("forward", "postprocess")
BATCH = ("queue wait", "batch wait", *CALL)


class TruthServer(NamedTuple):
    """A server. `arguments`: of the interpreter, with `{port}`. `stages`: that can be delayed, as `work.add_delay` names them."""

    title: str
    arguments: tuple[str, ...]
    stages: tuple[str, ...] = CALL
    is_grpc: bool = False

    def make_command(self, port: int) -> list[str]:
        """Returns the command."""
        return [sys.executable, *(part.replace("{port}", str(port)) for part in self.arguments)]


def _module(name: str, *more: str) -> tuple[str, ...]:
    return "-m", f"{PROGRAMS}.{name}", "{port}", *more


def _gunicorn(*options: str) -> tuple[str, ...]:
    return "-m", "gunicorn", "-b", "127.0.0.1:{port}", *options, f"{PROGRAMS}.flask_app:app"


SERVERS = {
    "werkzeug": TruthServer("Flask, its own server", _module("flask_app")),
    "gunicorn-sync": TruthServer("Flask, gunicorn sync, 2 workers", _gunicorn("-w", "2")),
    "gunicorn-gthread": TruthServer("Flask, gunicorn gthread", _gunicorn("--threads", "4")),
    "waitress": TruthServer(
        "Flask, waitress", ("-m", "waitress", "--listen", "127.0.0.1:{port}", f"{PROGRAMS}.flask_app:app")
    ),
    "aiohttp": TruthServer("aiohttp", _module("aiohttp_app")),
    "tornado": TruthServer("Tornado, model on the event loop", _module("tornado_app")),
    "sanic": TruthServer("Sanic", _module("sanic_app")),
    "grpc": TruthServer("gRPC, 4 threads", _module("grpc_app"), CALL, True),
    "grpc-aio": TruthServer("gRPC, asyncio", _module("grpc_app", "aio"), CALL, True),
    "async-batcher": TruthServer("FastAPI, hand-made batcher", _module("async_batcher_app"), BATCH),
    "thread-batcher": TruthServer("Flask, batching thread", _module("thread_batcher_app"), BATCH),
    "litserve": TruthServer("LitServe, batched", _module("litserve_app"), ("forward", "postprocess")),
}
"""By name."""
