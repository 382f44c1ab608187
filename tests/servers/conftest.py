"""Tests that run in an environment of their own (`make test-servers`) and are not collected elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.otlp_receiver import OtlpReceiver

_OTHER_ENVIRONMENTS = "mlserver", "kserve", "pytriton"
"""Libraries with an environment of their own: on top of the servers', but for the last one."""


def _list_ignored() -> list[str]:
    """Returns the names of the tests whose libraries are not in this environment."""
    missing = [f"test_{name}.py" for name in _OTHER_ENVIRONMENTS if not importlib.util.find_spec(name)]
    if importlib.util.find_spec("tornado"):
        return missing
    names = [path.name for path in Path(__file__).parent.glob("test_*.py")]
    return [name for name in names if name != "test_pytriton.py" or name in missing]


collect_ignore = _list_ignored()


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver
