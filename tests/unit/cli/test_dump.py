"""`otel-infer dump`: where the tape of a running server is put."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli import dump, main, running_server
from otel_infer.sidecar.recording import file


def test_a_file_that_was_there_and_that_others_could_read_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, out = tmp_path / "told.tape", tmp_path / "out.tape"
    file.RecordingWriter(told).close()
    out.write_text("of before")
    out.chmod(0o644)

    @contextlib.contextmanager
    def window(folder: Path) -> Iterator[Path]:
        yield told

    monkeypatch.setattr(running_server, "find_server_folder", lambda rings, server: tmp_path)
    monkeypatch.setattr(running_server, "open_dump", window)
    assert main(["dump", "--out", str(out)]) == 0
    assert out.read_bytes() == told.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_file_whose_mode_cannot_be_changed_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise PermissionError("it is somebody else's")

    told, out = tmp_path / "told", tmp_path / "out"
    told.write_bytes(b"facts")
    out.write_bytes(b"older facts")
    monkeypatch.setattr("os.fchmod", refused)
    dump._copy_recording(told, out)
    assert out.read_bytes() == b"facts"
