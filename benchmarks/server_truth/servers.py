"""The servers, and which of their stages can be delayed."""

from __future__ import annotations

import importlib.util
import sys
from typing import NamedTuple

PROGRAMS = "benchmarks.server_truth.programs"
CALL = ("forward", "postprocess")
BATCH = ("queue wait", "batch wait", *CALL)


class TruthServer(NamedTuple):
    """A server. `arguments`: of the interpreter, with `{port}`. `stages`: that can be delayed, as `work.add_delay` names them.

    `outer`: stages that contain others. `path`, `body`: of a request. `library`: which only the environment of its own has; empty = that of `make test-servers`.
    `concurrency`: requests at a time. `is_isolated`: in a network namespace, because it opens ports on every address.
    `delays_by_file`: a request is delayed if it finds the file that DELAY_FILE names.
    """

    title: str
    arguments: tuple[str, ...]
    stages: tuple[str, ...] = CALL
    is_grpc: bool = False
    path: str = "/classify"
    body: bytes = b'{"text": "a text"}'
    library: str = ""
    outer: tuple[str, ...] = ()
    is_isolated: bool = False
    concurrency: int = 16
    delays_by_file: bool = False

    def make_command(self, port: int) -> list[str]:
        """Returns the command."""
        return [sys.executable, *(part.replace("{port}", str(port)) for part in self.arguments)]


def _module(name: str, *more: str) -> tuple[str, ...]:
    return "-m", f"{PROGRAMS}.{name}", "{port}", *more


def _gunicorn(*options: str, app: str = "flask_app:app") -> tuple[str, ...]:
    return "-m", "gunicorn", "-b", "127.0.0.1:{port}", *options, f"{PROGRAMS}.{app}"


def _uvicorn(app: str) -> tuple[str, ...]:
    return "-m", "uvicorn", "--port", "{port}", "--log-level", "warning", f"{PROGRAMS}.{app}"


_BENTOML = ("-m", "bentoml", "serve", "--host", "127.0.0.1", "--port", "{port}")
_V2_BODY = b'{"inputs": [{"name": "rows", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}'


SERVERS = {
    "werkzeug": TruthServer("Flask, its own server", _module("flask_app")),
    "gunicorn-sync": TruthServer("Flask, gunicorn sync, 2 workers", _gunicorn("-w", "2")),
    "gunicorn-gthread": TruthServer("Flask, gunicorn gthread", _gunicorn("--threads", "4")),
    "waitress": TruthServer(
        "Flask, waitress", ("-m", "waitress", "--listen", "127.0.0.1:{port}", f"{PROGRAMS}.flask_app:app")
    ),
    "django": TruthServer("Django, gunicorn gthread", _gunicorn("--threads", "4", app="django_app:wsgi")),
    "django-asgi": TruthServer("Django, uvicorn", _uvicorn("django_app:asgi")),
    "falcon": TruthServer("Falcon, gunicorn gthread", _gunicorn("--threads", "4", app="falcon_app:app")),
    "litestar": TruthServer("Litestar", _uvicorn("litestar_app:app")),
    "aiohttp": TruthServer("aiohttp", _module("aiohttp_app")),
    "tornado": TruthServer("Tornado, model on the event loop", _module("tornado_app")),
    "sanic": TruthServer("Sanic", _module("sanic_app")),
    "grpc": TruthServer("gRPC, 4 threads", _module("grpc_app"), CALL, True),
    "grpc-aio": TruthServer("gRPC, asyncio", _module("grpc_app", "aio"), CALL, True),
    "async-batcher": TruthServer("FastAPI, hand-made batcher", _module("async_batcher_app"), BATCH),
    "thread-batcher": TruthServer("Flask, batching thread", _module("thread_batcher_app"), BATCH),
    "litserve": TruthServer("LitServe, batched", _module("litserve_app")),
    "bentoml": TruthServer(
        "BentoML, batched",
        (*_BENTOML, f"{PROGRAMS}.bentoml_app:Classes"),
        ("forward",),
        body=b'{"texts": ["a text"]}',
    ),
    "mlserver": TruthServer(
        "MLServer, batched",
        _module("mlserver_app"),
        ("batch wait", "forward"),
        path="/v2/models/classes/infer",
        body=_V2_BODY,
        library="mlserver",
    ),
    "kserve": TruthServer(
        "KServe",
        _module("kserve_app"),
        ("forward",),
        path="/v1/models/classes:predict",
        body=b'{"instances": [[1.0]]}',
        library="kserve",
        outer=("predict",),
    ),
    "pytriton": TruthServer(
        "PyTriton",
        _module("pytriton_app"),
        path="/v2/models/classes/infer",
        body=_V2_BODY,
        library="pytriton",
        outer=("infer function",),
        concurrency=1,  # more would wait in Triton, which is another program: its own tracing records that
    ),
    "sglang": TruthServer(
        "SGLang on a CPU",
        _module("sglang_app"),
        ("tokenize", "queue", "prefill", "decode", "postprocess"),
        path="/v1/completions",
        body=b'{"model": "tiny", "prompt": "why is the sky blue?", "max_tokens": 5}',
        library="sglang",
        delays_by_file=True,
    ),
    "ray": TruthServer("Ray Serve", _module("ray_app"), is_isolated=True),
}
"""By name."""


def list_names() -> list[str]:
    """Returns the servers that this Python environment is for."""
    own = [
        name
        for name, server in SERVERS.items()
        if server.library and importlib.util.find_spec(server.library)
    ]
    return own or [name for name, server in SERVERS.items() if not server.library]
