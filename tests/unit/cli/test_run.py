"""`otel-infer run`: who gets which signal, whose folder is whose, and whom it waits for."""

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
from otel_infer.ringbuffer.writer import FileArena, RequestWriter

RUN = (sys.executable, "-m", "otel_infer", "run", "--")
NOWHERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-run-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def environment(**changes: str) -> dict[str, str]:
    """Ours without anything of OpenTelemetry, and these."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}, **changes}


def until(reached: Callable[[], Any], timeout: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (result := reached()):
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)
    return result


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────

SERVER = """
import os, pathlib, signal, sys, time
told = pathlib.Path(sys.argv[1])

def tell(number, frame=None):
    with told.open("a") as file:
        print(signal.Signals(number).name, file=file)

signal.signal(signal.SIGINT, tell)
signal.signal(signal.SIGQUIT, tell)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
with told.open("w") as file:
    print(os.getppid(), len(blocked), file=file)
time.sleep(30)
"""


class OnTerminal:
    """A server under `otel-infer run` in the foreground of a terminal; `told`: `run`'s pid, what was blocked, each signal."""

    def __init__(self, told: Path, stdin: str) -> None:
        self._path = told
        self._main, terminal = pty.openpty()
        redirected = ("sh", "-c", f'exec "$@" <{stdin}', "sh")
        # Whoever runs these tests in the background may have them ignore what a terminal sends.
        shell = ("env", "--default-signal=INT,QUIT", "setsid", "--ctty", "--wait", *redirected)
        command = [*shell, *RUN, sys.executable, "-c", SERVER, str(told)]
        self._process = subprocess.Popen(command, stdin=terminal, env=environment(OTEL_INFER_ENABLED="off"))
        os.close(terminal)
        self.wait_for(0)
        self.run = int(self.told[0].split()[0])

    @property
    def told(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def wait_for(self, signals: int) -> None:
        """Until the server has had so many."""
        until(lambda: len(self.told) > signals)

    def key(self, pressed: bytes) -> None:
        os.write(self._main, pressed)

    def end(self) -> int:
        os.kill(self.run, signal.SIGTERM)
        status = self._process.wait(15)
        os.close(self._main)
        return status


@pytest.fixture(params=["/dev/tty", "/dev/null"])
def on_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnTerminal]:
    started = OnTerminal(tmp_path / "told", request.param)
    yield started
    assert started.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_what_a_terminal_sends_to_its_foreground_reaches_the_server_once(
    on_terminal: OnTerminal, key: bytes, name: str
) -> None:
    for times in (1, 2):
        on_terminal.key(key)
        on_terminal.wait_for(times)
        time.sleep(3 * run.POLL_S)
        assert on_terminal.told[1:] == [name] * times


def test_what_somebody_sends_to_run_on_a_terminal_is_passed_on(on_terminal: OnTerminal) -> None:
    for times, number in enumerate((signal.SIGINT, signal.SIGQUIT, signal.SIGINT), 1):
        os.kill(on_terminal.run, number)
        on_terminal.wait_for(times)
    assert on_terminal.told[1:] == ["SIGINT", "SIGQUIT", "SIGINT"]


def test_no_signal_is_blocked_in_the_server(on_terminal: OnTerminal) -> None:
    assert on_terminal.told[0].split()[1] == "0"


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


def test_no_signal_is_blocked_in_a_sidecar_that_is_started_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISED],
        capture_output=True,
        text=True,
        env=environment(**NOWHERE),
        check=True,
    )
    status, blocked, afterwards = json.loads(done.stdout)
    assert (status, afterwards) == (0, [])
    assert len(blocked) > 1
    assert not any(blocked)


# ── whose folder it is ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["auto", "sidecar"])
def test_a_folder_that_another_server_has_is_left_to_it(folder: Path, mode: str) -> None:
    theirs = directory.FileLock(folder / directory.OWNER_LOCK)
    assert theirs.acquire()
    (folder / "1-a.requests").touch()
    script = "import os; print([os.environ['OTEL_INFER_RINGS']])"
    done = subprocess.run(
        [*RUN, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(**NOWHERE, OTEL_INFER_RINGS=str(folder), OTEL_INFER_MODE=mode),
        check=True,
    )
    assert done.stdout == "['']\n", "nor do the processes of this one write into it"
    (line,) = done.stderr.splitlines()
    assert f"{folder} is another server's" in line
    assert "set OTEL_INFER_RINGS to a folder of its own" in line
    assert sorted(os.listdir(folder)) == ["1-a.requests", directory.OWNER_LOCK]
    theirs.release()


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """A process of the server that writes rings, for so long."""

    def __init__(self, folder: Path, seconds: float) -> None:
        ready, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _kept = RequestWriter(FileArena(folder), "1-a", "server")
                os.write(said, b"1")
                time.sleep(seconds)
            finally:
                os._exit(0)
        os.close(said)
        assert os.read(ready, 1) == b"1"
        os.close(ready)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[run.Supervisor]:
    """A supervisor whose server has ended, and whose sidecar does not leave by itself."""
    monkeypatch.setattr(run, "ORPHANS_S", 0.5, raising=False)
    monkeypatch.setattr(run, "FLUSH_S", 1.0)
    supervisor = run.Supervisor(Config())
    supervisor.status, supervisor._folder = 0, folder
    sidecar = supervisor._sidecar = subprocess.Popen(["sleep", "30"])
    yield supervisor
    sidecar.kill()
    sidecar.wait()


def test_a_sidecar_is_left_to_the_processes_that_outlive_the_server(
    folder: Path, ended: run.Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the server makes itself a daemon."""
    writer = Writer(folder, 30)
    ended.wait_for_sidecar()
    writer.end()
    assert ended._sidecar is not None
    assert ended._sidecar.poll() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "processes of the server still run" in line


def test_a_sidecar_that_is_stuck_is_killed_and_processes_may_take_a_moment_to_end(
    folder: Path, ended: run.Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(folder, 0.2)
    ended.wait_for_sidecar()
    writer.end()
    assert ended._sidecar is not None
    assert ended._sidecar.returncode == -signal.SIGKILL
    assert capsys.readouterr().err == ""
