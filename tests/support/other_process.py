"""Another process, and a volume that other users may write to: what locks and owners of files need in a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_infer.ringbuffer import directory


@contextlib.contextmanager
def another_process(work: Callable[[], Any]) -> Iterator[int]:
    """Runs `work` in a process that lives until the block ends; a process does not see its own locks as held."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = work()
            os.write(written, b"1" if result is not None else b"0")
            signal.pause()
        finally:
            os._exit(1)
    os.close(written)
    try:
        assert os.read(ready, 1) == b"1"
        yield pid
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def holding(path: Path) -> Callable[[], directory.FileLock]:
    """Returns the work of a process that holds this lock."""

    def hold() -> directory.FileLock:
        lock = directory.FileLock(path)
        assert lock.acquire()
        return lock

    return hold


@contextlib.contextmanager
def shared_volume() -> Iterator[Path]:
    """Yields a folder on tmpfs like an emptyDir: every user may write to it, and there is no sticky bit."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-volume-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
