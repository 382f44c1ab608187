"""Tests that run in an environment of their own (`make test-servers`) and are not collected elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import OtlpReceiver

collect_ignore_glob = [] if importlib.util.find_spec("tornado") else ["test_*.py"]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver
