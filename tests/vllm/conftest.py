"""Tests that run in an environment of their own (`make test-vllm`) and are not collected elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.vllm.serving import READY_S, vllm_serve

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def serve(
    receiver: OtlpReceiver, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    """Starts servers that end with the module; every step of every request is exported."""
    servers: list[Server] = []

    def start(*options: str, environ: dict[str, str] | None = None, **how: Any) -> Server:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        variables = {**receiver.environ, "OTEL_INFER_STEPS": "all", **(environ or {})}
        server = vllm_serve(how.pop("model", tiny_llama), log, variables, *options, **how)
        servers.append(server)
        return server.start(READY_S)

    yield start
    for server in servers:
        if server.process is not None and server.process.poll() is None:
            server.stop()
