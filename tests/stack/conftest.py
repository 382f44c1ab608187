"""The stack that all tests of this folder share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.running import VLLM, Stack, find_compiler, run_stack
from tests.stack.tools import tool

LOAD_S = 75


@pytest.fixture(scope="session")
def stack(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yields the stack after `LOAD_S` seconds of load. The load continues during the tests."""
    tool("prometheus")
    if not VLLM.exists():
        pytest.skip("vLLM is not installed: run make .venv-vllm/.dev")
    if find_compiler() is None:
        pytest.skip("no C compiler is installed")
    with run_stack(tmp_path_factory.mktemp("stack"), tiny_llama) as stack:
        time.sleep(LOAD_S)
        yield stack
