"""A process is signalled only while it shows our handler; the program's own use of the signal wins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.stack_signal import find_free_signal
from otel_infer.sidecar.probes.stalls.stack_dump import StackDump

pytestmark = pytest.mark.skipif(
    native is None or not hasattr(os, "pidfd_open"), reason="no compiled module, or no pidfd"
)

SERVER = """
import faulthandler, os, signal, sys, threading, time
from pathlib import Path
from otel_infer.instrumentation.signals import instrumentor
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.recorder import recorder
recorder.start(lambda: FileArena(Path(sys.argv[1])), lambda: None, lambda reason: None)
recorder.ensure_rings()
instrumentor.install()
words = recorder.requests.words
number = words[layout.W_STACK_SIGNAL]
handled = []
def wait_for_command():
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line, globals())
        print("done", flush=True)
wait_for_command()
"""


class Server:
    """A process with rings, which runs one line of Python after another."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()
        self._readers = MergedReader()
        self._readers.discover_rings(folder, _clock.now())
        (self.rings,) = self._readers.processes
        self.dump = StackDump(self.rings)

    def run(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() in ("ready\n", "done\n")

    @property
    def number(self) -> int:
        return int(self.rings.reader.header.words[layout.W_STACK_SIGNAL])

    def read_functions(self) -> list[str]:
        """Returns the functions of the main thread, innermost first."""
        thread = self.dump.find_thread(self.process.pid)
        return [frame.function for frame in self.dump.read_stack(thread)] if thread else []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.dump.close()
    server.process.kill()
    server.process.wait()


def test_the_stacks_of_a_process_are_read(server: Server) -> None:
    assert server.read_functions() == ["wait_for_command", "<module>"]


def test_the_stack_of_each_thread_is_its_own(server: Server) -> None:
    server.run(
        "done = threading.Event(); worker = threading.Thread(target=done.wait, daemon=True); worker.start()"
    )
    assert server.read_functions()[0] == "wait_for_command"
    main, worker = server.dump.list_threads()
    assert main == server.process.pid
    assert [frame.function for frame in server.dump.read_stack(worker)][:2] == ["wait", "wait"]
    until = time.monotonic() + 5  # the signal ended its wait for a moment
    while not server.dump.waits_for_futex(worker) and time.monotonic() < until:
        time.sleep(0.01)
    assert server.dump.waits_for_futex(worker) and not server.dump.waits_for_futex(main)
    assert server.dump.list_threads(running_only=True) == []


def test_a_thread_without_python_code_is_signalled_once(server: Server) -> None:
    server.run("import _thread, ctypes; libc = ctypes.CDLL(None); start = libc.pthread_create")
    server.run(
        "thread = ctypes.c_void_p(); start(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(60)) and 1 / 0"
    )
    server.read_functions()
    (other,) = [thread for thread in server.dump.list_threads() if thread != server.process.pid]
    before = server.dump.signals
    while server.dump.signals == before:  # a thread that starts blocks signals for a moment
        assert server.dump.read_stack(other) == ()
    assert server.dump.read_stack(other) == ()
    assert server.dump.signals == before + 1


def test_a_handler_of_the_program_wins(server: Server) -> None:
    before = server.number
    server.run("signal.signal(number, lambda *a: handled.append(a))")
    assert server.number not in (0, before)
    assert server.read_functions()[0] == "wait_for_command"
    server.run("assert not handled; os.kill(os.getpid(), number); assert len(handled) == 1")


def test_faulthandler_of_the_program_wins(server: Server, tmp_path: Path) -> None:
    before = server.number
    server.run(
        f"theirs = open({str(tmp_path / 'theirs')!r}, 'w'); faulthandler.register(number, file=theirs)"
    )
    assert server.number not in (0, before)
    assert server.read_functions()
    assert (tmp_path / "theirs").read_text() == ""


@pytest.mark.parametrize(
    "change",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, {number})",
        "faulthandler.unregister(number)",
        "os.close(words[layout.W_STACK_FILE]); open('/dev/null')",
        "recorder.stop()",
    ],
)
def test_a_process_without_our_handler_is_not_signalled(server: Server, change: str) -> None:
    server.run(change)
    assert server.read_functions() == []


def test_a_signal_after_the_end_of_recording_does_nothing(server: Server) -> None:
    server.run("recorder.stop(); os.kill(os.getpid(), number)")
    assert server.process.poll() is None


def test_a_dead_process_is_not_signalled(server: Server) -> None:
    assert server.read_functions()
    server.process.kill()
    server.process.wait()
    assert server.read_functions() == []


def test_a_forked_child_has_a_file_of_its_own(server: Server, tmp_path: Path) -> None:
    server.run("child = os.fork() or (recorder.ensure_rings(), time.sleep(60))")
    until = time.monotonic() + 5
    while len(list(tmp_path.glob("*.stacks"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    server.run("os.kill(child, 9); os.waitpid(child, 0)")
    assert len(list(tmp_path.glob("*.stacks"))) == 2
    assert server.read_functions()[0] == "wait_for_command"


def test_used_signals_are_not_free() -> None:
    first = find_free_signal()
    previous = signal.signal(first, lambda *_: None)
    try:
        assert find_free_signal() not in (0, first)
        assert find_free_signal(excluded=find_free_signal()) != find_free_signal()
    finally:
        signal.signal(first, previous)


def test_rings_in_memory_have_no_stacks() -> None:
    rings: Any = ProcessRings.__new__(ProcessRings)
    rings.path = None
    assert rings.stacks_path is None
