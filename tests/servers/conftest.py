"""Tests that run in an environment of their own (`make test-servers`) and are not collected elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import OtlpReceiver

_OVER_SERVERS = "mlserver", "kserve"
"""Libraries with an environment of their own on top of the servers'."""
collect_ignore_glob = (
    [f"test_{name}.py" for name in _OVER_SERVERS if not importlib.util.find_spec(name)]
    if importlib.util.find_spec("tornado")
    else ["test_*.py"]
)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver
