"""Programs of the given folder come before Debian's, whatever their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack import tools


def make_program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Debian's Alertmanager, unpacked; nothing else is installed."""
    monkeypatch.setattr(tools, "UNPACKED", tmp_path / "debian")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("OTEL_INFER_TEST_TOOLS", raising=False)
    return make_program(tmp_path / "debian" / "prometheus-alertmanager")


def test_a_given_program_comes_before_debians(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debian: str
) -> None:
    given = make_program(tmp_path / "given" / "alertmanager")
    monkeypatch.setenv("OTEL_INFER_TEST_TOOLS", str(tmp_path / "given"))
    assert tools.find_tool("alertmanager") == given


def test_debians_program_is_found_by_its_name(debian: str) -> None:
    assert tools.find_tool("alertmanager") == debian
    assert tools.find_tool("otelcol") is None
