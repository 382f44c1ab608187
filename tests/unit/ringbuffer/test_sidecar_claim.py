"""One process at a time may start the sidecar of a server, and a killed one keeps nobody waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer.ringbuffer.sidecar_claim import claim_sidecar_start, is_starting


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def sleeping_child(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was started with the claim, which its parent has closed."""
    claim = claim_sidecar_start(folder)
    assert claim is not None
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(claim,)
    ) as child:
        os.close(claim)
        yield child
        child.kill()


def test_one_process_at_once_may_start_the_sidecar(folder: Path) -> None:
    assert not is_starting(folder)
    claim = claim_sidecar_start(folder)
    assert claim is not None
    assert is_starting(folder)
    assert claim_sidecar_start(folder) is None
    os.close(claim)
    assert not is_starting(folder)
    assert claim_sidecar_start(folder) is not None


def test_a_sidecar_that_is_killed_while_it_starts_delays_no_other(
    folder: Path, sleeping_child: subprocess.Popen[bytes]
) -> None:
    assert is_starting(folder)
    assert claim_sidecar_start(folder) is None
    sleeping_child.kill()
    sleeping_child.wait()
    assert claim_sidecar_start(folder) is not None


def test_a_folder_that_cannot_hold_the_claim_is_started_without(folder: Path) -> None:
    assert claim_sidecar_start(folder / "missing") == -1
