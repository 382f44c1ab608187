"""The server's stderr states why its sidecar crashed."""

from __future__ import annotations

from pathlib import Path

from otel_infer.sidecar import launcher


def test_the_reason_of_a_crash_is_on_one_line(tmp_path: Path) -> None:
    launcher.write_end_reason(tmp_path, ValueError("bad\ncompression"))
    line = launcher.describe_end(tmp_path)
    assert "(ValueError: bad compression)" in line
    assert "telemetry is off" in line
    assert "\n" not in line


def test_a_crash_without_a_reason_is_stated(tmp_path: Path) -> None:
    assert "the sidecar crashed; telemetry is off" in launcher.describe_end(tmp_path)


def test_a_planted_reason_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("private")
    (tmp_path / "sidecar.error").symlink_to(tmp_path / "secret")
    launcher.write_end_reason(tmp_path, ValueError("reason"))
    assert "private" not in launcher.describe_end(tmp_path)
    assert (tmp_path / "secret").read_text() == "private"
