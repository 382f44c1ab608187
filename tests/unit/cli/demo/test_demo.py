"""`otel-infer demo` prints a command that the user can run as it is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from otel_infer.cli.demo import command


@pytest.mark.parametrize(
    ("path", "expected"),
    [(".venv/bin", "otel-infer"), ("elsewhere", ".venv/bin/otel-infer"), ("", ".venv/bin/otel-infer")],
    ids=["on PATH", "another on PATH", "PATH empty"],
)
def test_printed_program_is_the_running_installation(
    path: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (".venv/bin", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "otel-infer").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    assert command.find_program() == expected
    found = shutil.which(expected)
    assert found is not None
    assert Path(found).samefile(tmp_path / ".venv" / "bin" / "otel-infer")
