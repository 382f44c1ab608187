"""What the environment of this process exports to the processes that it starts."""

from __future__ import annotations

import os

import pytest

from otel_infer.config import environment


@pytest.mark.parametrize("before", [None, "", "/mine"])
def test_a_folder_is_on_python_path_only_while_the_block_runs(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    with environment.put_on_python_path("/site"):
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == "/site"
        with environment.put_on_python_path("/site"):
            assert os.environ["PYTHONPATH"].count("/site") == 1
    assert os.environ.get("PYTHONPATH") == before
