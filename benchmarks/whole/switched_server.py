"""A server under `otel-infer run`, whose hooks are installed and removed while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine
from otel_infer.cli.demo.free_port import find_free_port

SITE = Path(__file__).with_name("site")
SIDECAR = "otel_infer.sidecar"
SWITCH = signal.SIGRTMIN + 1
"""The signal of `site/sitecustomize.py`: servers such as gunicorn use SIGUSR1 and SIGUSR2 themselves."""
START_S, SWITCH_S, STOP_S = 300.0, 20.0, 20.0
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
}


ON, UNMARKED, OFF = "on", "unmarked", "off"
"""All hooks as installed; without marks on a GPU; no hooks."""


class HookState(NamedTuple):
    """The state of a process, and its counts since its start."""

    obeyed: int
    state: str
    integrations: int
    marked_steps: int
    captured_graphs: int


class SwitchedServer:
    """Starts the server, switches its hooks, and reads the CPU time of its processes."""

    def __init__(
        self, command: Sequence[str], folder: Path, endpoint: str, variables: dict[str, str] | None = None
    ) -> None:
        self.port = find_free_port()
        self.states = folder / "states"
        self.states.mkdir(parents=True)
        self.acknowledged: list[HookState] = []
        self._log = folder / "server.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        output = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        added = (variables or {}).get("PYTHONPATH", "")
        paths = os.pathsep.join(filter(None, (str(SITE), added, kept.get("PYTHONPATH", ""))))
        switching = {"PYTHONPATH": paths, "WHOLE_STATES": str(self.states)}
        run = (sys.executable, "-m", "otel_infer", "run", "--")
        with self._log.open("wb") as log:
            self._supervisor = subprocess.Popen(
                [*run, *(part.replace("{port}", str(self.port)) for part in command)],
                stdout=log,
                stderr=log,
                env={**kept, **VARIABLES, **output, **(variables or {}), **switching},
                start_new_session=True,
            )

    def wait_until_ready(self, health: str = "/health") -> None:
        """Waits for the first successful response to this path; for a connection, if it is empty. Raises RuntimeError with
        the log if there is none."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._supervisor.poll() is None:
            with contextlib.suppress(OSError):
                if health:
                    urllib.request.urlopen(f"http://127.0.0.1:{self.port}{health}", timeout=2).close()
                else:
                    socket.create_connection(("127.0.0.1", self.port), 2).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"the server was not ready in time:\n{self.read_log()}")

    def read_log(self) -> str:
        """Returns the end of what the server printed."""
        return self._log.read_text(errors="replace")[-4000:]

    def list_processes(self) -> list[int]:
        """Returns the processes of the server: all below `otel-infer run` but the sidecar."""
        return [pid for pid in list_descendants(self._supervisor.pid) if SIDECAR not in read_command(pid)]

    def find_main_process(self) -> int:
        """Returns the process whose descendants are all other processes of the server."""
        return next(pid for pid in _list_children(self._supervisor.pid) if SIDECAR not in read_command(pid))

    def find_sidecar(self) -> int | None:
        """Returns the sidecar's process; None if it does not run."""
        pids = list_descendants(self._supervisor.pid)
        return next((pid for pid in pids if SIDECAR in read_command(pid)), None)

    def set_hooks(self, state: str) -> None:
        """Installs or removes all hooks, in every process of the server, and waits until each has acknowledged it.
        Raises RuntimeError if a process does not listen, does not acknowledge, or if none has hooks."""
        pids = [pid for pid in self.list_processes() if _is_python(pid)]
        before = {pid: self._read_state(pid) for pid in pids}
        deaf = [read_command(pid) for pid, known in before.items() if known is None]
        if deaf:
            raise RuntimeError(f"a process does not listen: {deaf}")
        (self.states / "wanted").write_text(state)
        for pid in pids:
            os.kill(pid, SWITCH)
        deadline = time.monotonic() + SWITCH_S
        for pid, known in before.items():
            while (now := self._read_state(pid)) is None or now[:2] != (known.obeyed + 1, state):
                if time.monotonic() > deadline or not _is_python(pid):
                    raise RuntimeError(f"{pid} did not acknowledge: {now}, {read_command(pid)}")
                time.sleep(0.005)
        self.acknowledged = [now for pid in pids if (now := self._read_state(pid))]
        if not any(process.integrations for process in self.acknowledged):
            raise RuntimeError(f"no process of the server has hooks\n{self.read_log()}")

    @property
    def marked_steps(self) -> int:
        """The steps that were marked on a GPU from the start to the last switch."""
        return sum(process.marked_steps for process in self.acknowledged)

    @property
    def captured_graphs(self) -> int:
        """The CUDA graphs that were captured while there were hooks, until the last switch."""
        return sum(process.captured_graphs for process in self.acknowledged)

    def read_cpu_ns(self) -> int:
        """Returns the CPU time of all threads of all processes of the server."""
        return sum(machine.read_cpu_ns(pid) for pid in self.list_processes())

    def close(self) -> None:
        """Ends all processes of the server."""
        processes = self.list_processes()
        self._supervisor.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(STOP_S)
        for pid in (*processes, self._supervisor.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._supervisor.wait()

    def _read_state(self, pid: int) -> HookState | None:
        try:
            obeyed, state, *counts = (self.states / f"{pid}.state").read_text().split()
        except FileNotFoundError:
            return None
        return HookState(int(obeyed), state, *map(int, counts))


def list_descendants(pid: int) -> list[int]:
    """Returns all processes below one."""
    return list(_walk_descendants(pid))


def _walk_descendants(pid: int) -> Iterator[int]:
    for child in _list_children(pid):
        yield child
        yield from _walk_descendants(child)


def _list_children(pid: int) -> list[int]:
    children = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return [int(child) for child in children]


def read_command(pid: int) -> str:
    """Returns the command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
