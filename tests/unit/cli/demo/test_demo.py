"""What `otel-infer demo` says at its end can be typed as it stands."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from otel_infer.cli.demo import command


@pytest.mark.parametrize(
    ("path", "said"),
    [(".venv/bin", "otel-infer"), ("elsewhere", ".venv/bin/otel-infer"), ("", ".venv/bin/otel-infer")],
)
def test_the_program_is_named_so_that_it_is_this_one_that_is_called(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (".venv/bin", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "otel-infer").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    assert command.find_program() == said
    found = shutil.which(said)
    assert found is not None
    assert Path(found).samefile(tmp_path / ".venv" / "bin" / "otel-infer")
