"""One stack for all tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.running import VLLM, Stack, compiler, running
from tests.stack.tools import tool

LOAD_S = 75


@pytest.fixture(scope="session")
def stack(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """After a minute and a quarter of load, which goes on while tests look."""
    tool("prometheus")
    if not VLLM.exists():
        pytest.skip("no vLLM here: make .venv-vllm/.dev")
    if compiler() is None:
        pytest.skip("there is no C compiler")
    with running(tmp_path_factory.mktemp("stack"), tiny_llama) as made:
        time.sleep(LOAD_S)
        yield made
