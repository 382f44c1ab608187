"""`otel-infer run` forwards signals, claims a folder for the rings and waits for its processes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.cli import run
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.writer import RequestWriter

RUN = (sys.executable, "-m", "otel_infer", "run", "--")
UNREACHABLE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-run-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment without OTEL_* variables, plus the changes."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}, **changes}


def wait_until(condition: Callable[[], Any], timeout: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)
    return result


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────

SERVER = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])

def log_signal(number, frame=None):
    with log.open("a") as file:
        print(signal.Signals(number).name, file=file)

signal.signal(signal.SIGINT, log_signal)
signal.signal(signal.SIGQUIT, log_signal)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
with log.open("w") as file:
    print(os.getppid(), len(blocked), file=file)
time.sleep(30)
"""


class OnTerminal:
    """A server under `otel-infer run` in the foreground of a terminal.

    `log_lines`: the pid of `run` and the number of blocked signals, then each received signal.
    """

    def __init__(self, log: Path, stdin: str) -> None:
        self._path = log
        self._main, terminal = pty.openpty()
        redirected = ("sh", "-c", f'exec "$@" <{stdin}', "sh")
        # A shell may start background jobs, such as these tests, with SIGINT and SIGQUIT ignored.
        shell = ("env", "--default-signal=INT,QUIT", "setsid", "--ctty", "--wait", *redirected)
        command = [*shell, *RUN, sys.executable, "-c", SERVER, str(log)]
        self._process = subprocess.Popen(command, stdin=terminal, env=environment(OTEL_INFER_ENABLED="off"))
        os.close(terminal)
        self.wait_for_signals(0)
        self.run_pid = int(self.log_lines[0].split()[0])

    @property
    def log_lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def wait_for_signals(self, count: int) -> None:
        """Waits until the server has received `count` signals."""
        wait_until(lambda: len(self.log_lines) > count)

    def press_key(self, key: bytes) -> None:
        os.write(self._main, key)

    def end(self) -> int:
        os.kill(self.run_pid, signal.SIGTERM)
        status = self._process.wait(15)
        os.close(self._main)
        return status


@pytest.fixture(params=["/dev/tty", "/dev/null"])
def on_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnTerminal]:
    started = OnTerminal(tmp_path / "log", request.param)
    yield started
    assert started.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_signal_of_the_terminal_reaches_the_server_once(
    on_terminal: OnTerminal, key: bytes, name: str
) -> None:
    for times in (1, 2):
        on_terminal.press_key(key)
        on_terminal.wait_for_signals(times)
        time.sleep(3 * run.POLL_S)
        assert on_terminal.log_lines[1:] == [name] * times


def test_signal_sent_to_run_is_forwarded(on_terminal: OnTerminal) -> None:
    for times, number in enumerate((signal.SIGINT, signal.SIGQUIT, signal.SIGINT), 1):
        os.kill(on_terminal.run_pid, number)
        on_terminal.wait_for_signals(times)
    assert on_terminal.log_lines[1:] == ["SIGINT", "SIGQUIT", "SIGINT"]


def test_run_goes_on_after_it_was_stopped_and_continued(on_terminal: OnTerminal) -> None:
    """As with Ctrl-Z and `fg`, or by a debugger."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(on_terminal.run_pid, number)
        time.sleep(3 * run.POLL_S)
    assert on_terminal.log_lines[1:] == []
    os.kill(on_terminal.run_pid, signal.SIGINT)
    on_terminal.wait_for_signals(1)
    assert on_terminal.log_lines[1:] == ["SIGINT"]


def test_server_has_no_blocked_signals(on_terminal: OnTerminal) -> None:
    assert on_terminal.log_lines[0].split()[1] == "0"


SUPERVISED = """
import json, os, signal, subprocess, sys
from otel_infer.config import environment as config; from otel_infer.sidecar import launcher as launch
from otel_infer.cli import run

blocked = []

def sidecar(*_, **__):
    blocked.append(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    return subprocess.Popen([sys.executable, "-c", "pass"])

launch.start_sidecar = sidecar
status = run.Supervisor(config.from_env()).run(["sleep", "3"], {})
print(json.dumps([status, blocked, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))]))
"""


def test_restarted_sidecar_has_no_blocked_signals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISED],
        capture_output=True,
        text=True,
        env=environment(**UNREACHABLE),
        check=True,
    )
    status, blocked, afterwards = json.loads(done.stdout)
    assert (status, afterwards) == (0, [])
    assert len(blocked) > 1
    assert not any(blocked)


# ── the folder of the rings ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["auto", "sidecar"])
def test_folder_of_another_server_is_left_alone(folder: Path, mode: str) -> None:
    owner_lock = directory.FileLock(folder / directory.OWNER_LOCK)
    assert owner_lock.acquire()
    (folder / "1-a.requests").touch()
    script = "import os; print([os.environ['OTEL_INFER_RINGS']])"
    done = subprocess.run(
        [*RUN, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(**UNREACHABLE, OTEL_INFER_RINGS=str(folder), OTEL_INFER_MODE=mode),
        check=True,
    )
    assert done.stdout == "['']\n", "the processes of this server write no rings there"
    (line,) = done.stderr.splitlines()
    assert str(folder) in line and "another server" in line
    assert "OTEL_INFER_RINGS" in line
    assert sorted(os.listdir(folder)) == ["1-a.requests", directory.OWNER_LOCK]
    owner_lock.release()


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """A process of the server that writes rings for `seconds`."""

    def __init__(self, folder: Path, seconds: float) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _writer = RequestWriter(FileArena(folder), "1-a", "server")
                os.write(write_end, b"1")
                time.sleep(seconds)
            finally:
                os._exit(0)
        os.close(write_end)
        assert os.read(read_end, 1) == b"1"
        os.close(read_end)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def ended_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[run.Supervisor]:
    """A supervisor whose server has ended and whose sidecar does not exit by itself."""
    monkeypatch.setattr(run, "ORPHANS_S", 0.5)
    monkeypatch.setattr(run, "FLUSH_S", 1.0)
    supervisor = run.Supervisor(Config())
    supervisor.status, supervisor._folder = 0, folder
    sidecar = supervisor._sidecar = subprocess.Popen(["sleep", "30"])
    yield supervisor
    sidecar.kill()
    sidecar.wait()


def test_sidecar_stays_with_processes_that_outlive_the_server(
    folder: Path, ended_server: run.Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, a server that becomes a daemon."""
    writer = Writer(folder, 30)
    ended_server.wait_for_sidecar()
    writer.end()
    assert ended_server._sidecar is not None
    assert ended_server._sidecar.poll() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "still run" in line


def test_stuck_sidecar_is_killed(
    folder: Path, ended_server: run.Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of the server may end shortly after its main process."""
    writer = Writer(folder, 0.2)
    ended_server.wait_for_sidecar()
    writer.end()
    assert ended_server._sidecar is not None
    assert ended_server._sidecar.returncode == -signal.SIGKILL
    assert capsys.readouterr().err == ""
