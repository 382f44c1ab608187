"""Hooks of a running server are switched in every process, and each acknowledges it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.whole.switched_server import SwitchedServer

SERVER = """
import http.server, multiprocessing, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
def sleep(connection):
    connection.send("running")
    time.sleep(600)
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        here, there = multiprocessing.Pipe()
        multiprocessing.get_context(method).Process(target=sleep, args=(there,), daemon=True).start()
        here.recv()
    if "deaf" in sys.argv:
        subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"])
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def server(tmp_path: Path, program: Path, request: pytest.FixtureRequest) -> Iterator[SwitchedServer]:
    arguments = getattr(request, "param", ())
    started = SwitchedServer(
        (sys.executable, str(program), "{port}", *arguments), tmp_path / "run", "http://127.0.0.1:9"
    )
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.close()


def read_states(server: SwitchedServer) -> list[str]:
    pids = server.list_processes()
    return sorted((server.states / f"{pid}.state").read_text() for pid in pids)


def test_every_process_obeys_each_switch(server: SwitchedServer) -> None:
    server.set_hooks(False)
    states = read_states(server)
    assert len(states) >= 3
    assert {state.split()[1] for state in states} == {"off"}
    assert sum(int(state.split()[2]) > 0 for state in states) >= 3
    server.set_hooks(True)
    assert {state.split()[1] for state in read_states(server)} == {"on"}


@pytest.mark.parametrize("server", [("deaf",)], indirect=True)
def test_a_process_without_the_switch_is_an_error(server: SwitchedServer) -> None:
    with pytest.raises(RuntimeError, match="does not listen"):
        server.set_hooks(False)


def test_cpu_time_is_of_all_processes(server: SwitchedServer) -> None:
    assert server.read_cpu_ns() > 10_000_000
    assert server.find_main_process() in server.list_processes()
    assert server.find_sidecar() not in server.list_processes()
