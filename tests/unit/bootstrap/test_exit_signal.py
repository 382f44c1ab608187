"""In-process mode sends its last telemetry before SIGTERM ends the process, which ends as it would without."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from otel_infer._bootstrap.exit_signal import ExitSignalHandler

PROGRAM = """
import os, signal, sys, time
from otel_infer._bootstrap.exit_signal import ExitSignalHandler
def close():
    os.write(1, b"closed\\n")  # `print` raises in a handler that interrupts the `print` of the program
    {close}
{before}
ExitSignalHandler(close).install()
{after}
print("ready", flush=True)
time.sleep(30)
"""


def terminate(*, close: str = "", before: str = "", after: str = "") -> tuple[int, str]:
    """Sends SIGTERM to a process with the handler; returns its exit status, and what it printed then."""
    program = PROGRAM.format(close=close or "pass", before=before, after=after)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        printed, _ = process.communicate(timeout=20)
    return process.returncode, printed


@pytest.mark.parametrize("close", ["", "raise ValueError"], ids=["it closes", "closing fails"])
def test_a_terminated_process_closes_its_reader_and_ends_by_the_signal(close: str) -> None:
    assert terminate(close=close) == (-signal.SIGTERM, "closed\n")


def test_a_handler_of_the_server_stays() -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    assert terminate(before=before) == (7, "")


def test_a_server_that_replaces_the_handler_later_has_its_own() -> None:
    after = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    assert terminate(after=after) == (7, "")


def test_a_server_that_restores_and_raises_the_signal_again_closes_the_reader() -> None:
    """As uvicorn does: it keeps the handler that it found, and restores it after its shutdown."""
    after = """
found = signal.getsignal(signal.SIGTERM)
def shut_down(number, frame):
    signal.signal(number, found)
    signal.raise_signal(number)
signal.signal(signal.SIGTERM, shut_down)
"""
    assert terminate(after=after) == (-signal.SIGTERM, "closed\n")


def test_a_forked_child_does_not_close_the_parents_reader() -> None:
    after = """
import os
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(writer, b"1")  # Python drops signals that arrive before a child has forked completely
    for _ in range(300):
        time.sleep(0.1)  # a signal that arrives just before a long sleep would not end it
    os._exit(0)
os.read(reader, 1)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""
    assert terminate(after=after) == (-signal.SIGTERM, "closed\n")


def test_removal_restores_the_default() -> None:
    handler = ExitSignalHandler(lambda: None)
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        handler.install()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        handler.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, previous)
