"""`otel-infer dump` writes the tape of a running server to a private file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.cli import dump, main, running_server
from otel_infer.sidecar.recording import file


def test_existing_output_file_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode becomes 0600, even if other users could read the file before."""
    recording, out = tmp_path / "recording.tape", tmp_path / "out.tape"
    file.RecordingWriter(recording).close()
    out.write_text("previous content")
    out.chmod(0o644)

    @contextlib.contextmanager
    def dumped(folder: Path) -> Iterator[Path]:
        yield recording

    monkeypatch.setattr(running_server, "find_server_folder", lambda rings, server: tmp_path)
    monkeypatch.setattr(running_server, "open_dump", dumped)
    assert main(["dump", "--out", str(out)]) == 0
    assert out.read_bytes() == recording.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_planted_output_is_refused(tmp_path: Path, kind: str) -> None:
    recording, victim, out = tmp_path / "recording", tmp_path / "victim", tmp_path / "out"
    recording.write_bytes(b"events")
    victim.write_bytes(b"kept")
    out.symlink_to(victim) if kind == "link" else os.mkfifo(out)
    with pytest.raises(OSError):
        dump._copy_recording(recording, out)
    assert victim.read_bytes() == b"kept"
