"""Hooks of a running server are switched in every process, and each acknowledges it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.whole.switched_server import OFF, ON, UNMARKED, SwitchedServer

ROOT = Path(__file__).parents[2]
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
    if "marked" in sys.argv:
        import threading
        sys.path.insert(0, sys.argv[-1])
        from otel_infer.gpu.timing import timing
        from tests.support.fake_device import FakeDevice
        class Work:
            def on_device(self, *_):
                pass
            on_host = on_device
        def mark_steps(device=FakeDevice()):
            timing._find_device = lambda: device
            while True:
                timing.end(timing.begin(always=True), Work())
                time.sleep(0.005)
        threading.Thread(target=mark_steps, daemon=True).start()
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
    server.set_hooks(OFF)
    states = read_states(server)
    assert len(states) >= 3
    assert {state.split()[1] for state in states} == {"off"}
    assert sum(int(state.split()[2]) > 0 for state in states) >= 3
    server.set_hooks(ON)
    assert {state.split()[1] for state in read_states(server)} == {"on"}


@pytest.mark.parametrize("server", [("marked", str(ROOT))], indirect=True)
def test_marks_are_switched_besides_hooks(server: SwitchedServer) -> None:
    counts = []
    for state in (ON, UNMARKED, OFF, ON, OFF):
        server.set_hooks(state)
        counts.append(server.marked_steps)
        time.sleep(1)
    _, on, unmarked, off, on_again = counts
    assert 0 < on == unmarked == off < on_again


@pytest.mark.parametrize("server", [("deaf",)], indirect=True)
def test_a_process_without_the_switch_is_an_error(server: SwitchedServer) -> None:
    with pytest.raises(RuntimeError, match="does not listen"):
        server.set_hooks(OFF)


def test_cpu_time_is_of_all_processes(server: SwitchedServer) -> None:
    assert server.read_cpu_ns() > 10_000_000
    assert server.find_main_process() in server.list_processes()
    assert server.find_sidecar() not in server.list_processes()
