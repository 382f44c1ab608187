"""Tapes and logs are written to files of this user only, with mode 0600, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_infer.config.private_files import open_private_file, read_private_text


def write(path: Path, text: bytes, flags: int = os.O_WRONLY | os.O_TRUNC) -> None:
    descriptor = open_private_file(path, flags)
    os.write(descriptor, text)
    os.close(descriptor)


def test_a_new_file_is_private(tmp_path: Path) -> None:
    write(tmp_path / "a", b"text")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert read_private_text(tmp_path / "a", 100) == "text"


def test_an_open_file_of_this_user_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a longer text")
    path.chmod(0o666)
    write(path, b"text")
    assert (path.stat().st_mode & 0o777, path.read_bytes()) == (0o600, b"text")
    write(path, b", more", os.O_WRONLY | os.O_APPEND)
    assert path.read_bytes() == b"text, more"


@pytest.mark.parametrize("target", ["missing", "victim"])
def test_a_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="link"):
        open_private_file(tmp_path / "link", os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(OSError, match=r"link|No such"):
        read_private_text(tmp_path / "link", 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "victim"]
    assert (tmp_path / "victim").read_bytes() == b"kept"


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        open_private_file(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_private_text(tmp_path / "pipe", 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run as root")
def test_root_writes_to_no_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"planted")
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="another user"):
        open_private_file(path, os.O_WRONLY | os.O_TRUNC)
    assert path.read_bytes() == b"planted"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run as root")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"planted")
    tmp_path.chmod(0o777)
    pid = os.fork()
    if not pid:
        try:
            os.setuid(65534)
            open_private_file(path)
        except PermissionError:
            os._exit(7)
        except OSError:
            os._exit(8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert path.read_bytes() == b"planted"
