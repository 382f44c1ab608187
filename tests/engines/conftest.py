"""Fixtures of the engines' tests: a recording, and a server's request in which an engine is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.otlp_receiver import OtlpReceiver


class Serve(Protocol):
    """Begins a server's request, which is current until the block ends."""

    def __call__(self) -> AbstractContextManager[Any]: ...


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def serve() -> Serve:
    @contextmanager
    def request() -> Iterator[Any]:
        opened = start.open_request("POST", owner="asgi", server=True)
        assert opened is not None
        token = opened.attach()
        try:
            yield opened
        finally:
            detach(token)
            opened.close()

    return request


@contextmanager
def install(*instrumentors: Instrumentor) -> Iterator[None]:
    """Installs hooks, which must fit the library that is here, until the block ends."""
    for instrumentor in instrumentors:
        instrumentor.install()
    states = {instrumentor.name: instrumentor.status.state for instrumentor in instrumentors}
    assert set(states.values()) == {"active"}, [instrumentor.status.drift for instrumentor in instrumentors]
    yield
    for instrumentor in reversed(instrumentors):
        instrumentor.remove()


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Returns the file of a tiny Llama for llama.cpp and OpenVINO GenAI."""
    from tests.engines.gguf_models import make_gguf

    return make_gguf(tmp_path_factory.mktemp("models") / "tiny-llama.gguf", tiny_llama)


def describe(record: RequestRecord) -> tuple[str, str, str]:
    """Returns operation, provider and model of a request."""
    return record.operation, record.provider, record.model
