"""A child whose fork Python did not see, as of uWSGI, records into rings of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from otel_infer.ringbuffer import forks


def run_program(name: str) -> None:
    """Runs a program of `unseen_forks`. Raises CalledProcessError if its assertions do not hold."""
    subprocess.run([sys.executable, "-m", "tests.unit.ringbuffer.unseen_forks", name], check=True, timeout=60)


def test_a_child_of_an_unseen_fork_drops_the_rings_of_its_parent() -> None:
    run_program("drop_rings_of_parent")


def test_children_of_unseen_forks_create_different_ids() -> None:
    run_program("create_different_ids")


def test_a_fork_that_python_sees_calls_the_functions_once() -> None:
    calls: list[int] = []
    forks.call_in_child(lambda: calls.append(os.getpid()))
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        forks.notice_fork()
        os.write(writes, str(len(calls)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reads, 9) == b"1" and calls == []
