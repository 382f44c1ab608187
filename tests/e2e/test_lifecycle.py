"""Processes, threads and files: when they are created, and that they are removed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_infer.ringbuffer import directory
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import free_port
from tests.support.toy_server import MARK, RUN, Toy, processes, wait_until

pytestmark = pytest.mark.timeout(60)

COMMAND = (sys.executable, "-m", "otel_infer")
UNREACHABLE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def environment(**changes: str) -> dict[str, str]:
    """Returns this environment without OTEL_* variables, plus `changes`."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}, **changes}


def folders() -> set[str]:
    """Returns the names of the ring folders of this user."""
    home = directory.BASE / f"otel_infer-{os.getuid()}"
    return set(os.listdir(home)) if home.is_dir() else set()


def run(*command: str, input: str | None = None, timeout: float = 30, **environ: str) -> Any:
    """Runs a command to its end. Returns its status and output."""
    return subprocess.run(
        command, capture_output=True, text=True, input=input, timeout=timeout, env=environment(**environ)
    )


def run_script(script: str, **environ: str) -> Any:
    """Runs a script under `otel-infer run`, with an unreachable destination."""
    return run(*RUN, sys.executable, "-c", script, **{**UNREACHABLE, **environ})


# ── nothing is started ───────────────────────────────────────────────────────────────────────────────────────────

DISABLED: dict[str, Mapping[str, str]] = {
    "sdk-disabled": {"OTEL_SDK_DISABLED": "true", **UNREACHABLE},
    "no-exporters": {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", **UNREACHABLE},
    "off": {"OTEL_INFER_ENABLED": "off", **UNREACHABLE},
    "instrumentation-disabled": {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "flask,otel_infer", **UNREACHABLE},
}


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
@pytest.mark.parametrize("environ", DISABLED.values(), ids=DISABLED)
def test_disabled_by_configuration_nothing_is_started(
    tmp_path: Path, environ: Mapping[str, str], launcher: tuple[str, ...]
) -> None:
    with Toy(tmp_path / "log", environ, launcher) as toy:
        assert toy.chat().status == 200
        state = toy.state()
        assert (state["folder"], state["arena"]) == ("", "NoneType")
        assert "otel_infer" not in state["threads"]
        assert toy.sidecars() == []
        pids = {str(pid) for pid in processes(toy.mark)}
        assert not any(name.partition("-")[0] in pids for name in folders())
        assert toy.stop() == 143
        assert toy.read_log() == ""


def test_without_a_destination_nothing_is_started(tmp_path: Path) -> None:
    with Toy(tmp_path / "log", {}) as toy:
        assert toy.chat().status == 200
        assert toy.state()["arena"] == "NoneType"
        assert toy.sidecars() == []
        assert toy.read_log() == ""
        toy.stop()


def test_before_the_first_request_nothing_is_started(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        assert toy.state()["arena"] == "NoneType"
        assert toy.sidecars() == []
        assert toy.chat().status == 200
        toy.sidecar()
        toy.state()
        toy.stop()


# ── bad settings ─────────────────────────────────────────────────────────────────────────────────────────────────

INVALID = {
    "OTEL_INFER_STEPS": ("some", "all, auto, off"),
    "OTEL_INFER_STEP_BUDGET": ("many", "a whole number"),
    "OTEL_INFER_KEEP_UNSAMPLED": ("maybe", "on or off"),
    "OTEL_EXPORTER_OTLP_PROTOCOL": ("http/json", "http/protobuf, grpc"),
    "OTEL_METRIC_EXPORT_INTERVAL": ("1s", "a whole number of milliseconds"),
}


@pytest.mark.parametrize("variable", INVALID)
def test_invalid_setting_stops_commands_and_names_accepted_values(variable: str) -> None:
    value, accepted = INVALID[variable]
    done = run(*RUN, sys.executable, "-c", "print('ran')", **{variable: value})
    assert done.returncode == 2
    assert variable in done.stderr
    assert repr(value) in done.stderr
    assert accepted in done.stderr
    assert "ran" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", [*INVALID, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_TRACES_SAMPLER"])
def test_invalid_setting_never_stops_the_server(variable: str) -> None:
    value = INVALID.get(variable, ("some",))[0]
    script = (
        "import otel_infer; otel_infer.instrument(); otel_infer.request('chat').__enter__(); print('served')"
    )
    done = run(
        sys.executable, "-c", script, **{**UNREACHABLE, variable: value, "OTEL_INFER_MODE": "in-process"}
    )
    assert (done.returncode, done.stdout) == (0, "served\n")
    assert "Traceback" not in done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("otel_infer: ")]
    assert variable in warning


NO_CHILD = """
import otel_infer
from otel_infer.sidecar import launcher as launch

def refuse(*_, **__):
    raise launch.SidecarStartError("no more processes")

launch.start_sidecar = refuse
otel_infer.instrument()
with otel_infer.request("chat"):
    pass
print("served")
"""


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", "in-process, because "),
        ("sidecar", "disabled, because OTEL_INFER_MODE=sidecar and "),
    ],
    ids=["auto", "sidecar"],
)
def test_without_child_process_mode_is_in_process_or_disabled(mode: str, expected: str) -> None:
    before = folders()
    done = run(sys.executable, "-c", NO_CHILD, **{**UNREACHABLE, "OTEL_INFER_MODE": mode})
    assert (done.returncode, done.stdout) == (0, "served\n")
    assert expected in done.stderr and "no more processes" in done.stderr
    assert "Traceback" not in done.stderr
    assert not {name for name in folders() - before if not _is_alive(name)}


# ── otel-infer run ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_run_returns_the_servers_exit_status(status: int) -> None:
    before = folders()
    began = time.monotonic()
    assert run_script(f"import sys; sys.exit({status})").returncode == status
    assert time.monotonic() - began < 10
    assert not {name for name in folders() - before if not _is_alive(name)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_run_returns_128_plus_the_signal_number(number: signal.Signals) -> None:
    done = run_script(f"import os; os.kill(os.getpid(), {int(number)})")
    assert done.returncode == 128 + number


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_server_inherits_ignored_signals(
    ignored: signal.Signals,
) -> None:
    """As under `nohup`."""
    script = f"import signal, sys; sys.exit(signal.getsignal({int(ignored)}) is not signal.SIG_IGN)"
    command = [sys.executable, "-m", "otel_infer", "run", "--", sys.executable, "-c", script]
    done = subprocess.run(command, preexec_fn=lambda: signal.signal(ignored, signal.SIG_IGN), check=False)
    assert done.returncode == 0


def test_run_names_a_missing_or_invalid_program() -> None:
    missing = run(*RUN, "no-such-program", **UNREACHABLE)
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert run(*RUN, "/", **UNREACHABLE).returncode == 126
    assert run(*COMMAND, "run", **UNREACHABLE).returncode == 2


def test_run_names_a_tape_that_cannot_be_written(tmp_path: Path) -> None:
    tape = tmp_path / "nowhere" / "a.tape"
    done = run(*COMMAND, "run", "--tape", str(tape), "--", sys.executable, "-c", "pass", **UNREACHABLE)
    assert done.returncode == 2
    assert str(tape) in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_run_forwards_signals(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(43))\n"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(20)"
    )
    command = [*RUN, sys.executable, "-c", script]
    process = subprocess.Popen(
        command, env=environment(**UNREACHABLE), stdin=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(ready.exists)
    process.send_signal(number)
    assert process.wait(15) == 43


def test_signal_before_the_server_start_is_not_lost() -> None:
    command = [*RUN, sys.executable, "-c", "import time; time.sleep(20)"]
    process = subprocess.Popen(command, env=environment(**UNREACHABLE), start_new_session=True)
    wait_until(lambda: _handles(process.pid, signal.SIGTERM), every=0.0005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 128 + signal.SIGTERM


def _handles(pid: int, number: int) -> bool:
    """Returns whether the process has a handler for this signal."""
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (number - 1) & 1)


def test_run_reaps_orphans() -> None:
    script = """
import os, sys, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.2)
        os._exit(0)
    os.wait()
time.sleep(0.8)
parent = os.getppid()
children = open(f"/proc/{parent}/task/{parent}/children").read().split()
states = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] for pid in children]
sys.exit(len([state for state in states if state == "Z"]) + (len(children) != 2))
"""
    assert run_script(script).returncode == 0


DAEMON = """
import os, sys, time
from pathlib import Path
import otel_infer
otel_infer.instrument()
if os.fork():
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    os._exit(7)
with otel_infer.request("chat", model="toy"):
    pass
Path(sys.argv[1]).write_text(f"{os.getpid()} {os.environ['OTEL_INFER_RINGS']}")
time.sleep(30)
"""


def test_run_leaves_a_daemonized_server_and_sidecar_running(tmp_path: Path, receiver: OtlpReceiver) -> None:
    """The server forks and its first process ends."""
    ready, log = tmp_path / "ready", tmp_path / "stderr"
    began = time.monotonic()
    with log.open("wb") as output:
        command = [*RUN, sys.executable, "-c", DAEMON, str(ready)]
        done = subprocess.run(command, stderr=output, timeout=30, env=environment(**receiver.environ))
    assert done.returncode == 7
    assert time.monotonic() - began < 20
    assert "processes of the server still run" in log.read_text()
    pid, folder = ready.read_text().split()
    assert directory.is_held(Path(folder) / directory.SIDECAR_LOCK)
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not Path(folder).exists())
    assert receiver.wait_for(lambda it: any(span["name"] == "chat toy" for span in it.spans))


def test_run_does_not_touch_a_disabled_server() -> None:
    script = "import sys; print('otel_infer' in sys.modules)"
    done = run_script(script, OTEL_INFER_ENABLED="off")
    assert (done.stdout, done.stderr) == ("False\n", "")


# ── nothing is left ──────────────────────────────────────────────────────────────────────────────────────────────


def _is_alive(name: str) -> bool:
    """Returns whether the server of this folder runs, because it belongs to another test."""
    return Path(f"/proc/{name.partition('-')[0]}").exists()


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
def test_nothing_is_left_after_ctrl_c_on_terminal(
    tmp_path: Path, receiver: OtlpReceiver, launcher: tuple[str, ...]
) -> None:
    main, terminal = pty.openpty()
    # In the background, the tests may have inherited an ignored SIGINT.
    on_terminal = ("env", "--default-signal=INT", "setsid", "--ctty", "--wait", *launcher)
    toy = Toy(tmp_path / "log", receiver.environ, on_terminal)
    try:
        toy.start(stdin=terminal, start_new_session=False)
        reply = toy.chat()
        toy.state()
        toy.sidecar()
        os.write(main, b"\x03")
        status = toy.wait()
    finally:
        toy.__exit__()
        os.close(main)
        os.close(terminal)
    assert status == 0  # the toy server returns 0 on a single KeyboardInterrupt
    assert toy.folder is not None
    assert not toy.folder.exists()
    assert any(span["trace_id"] == reply.trace_id for span in receiver.spans)
    assert "Traceback" not in toy.read_log()


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
def test_nothing_is_left_after_a_group_signal(
    tmp_path: Path, receiver: OtlpReceiver, launcher: tuple[str, ...]
) -> None:
    with Toy(tmp_path / "log", receiver.environ, launcher) as toy:
        reply = toy.chat()
        toy.state()
        toy.sidecar()
        assert toy.process is not None
        os.killpg(toy.process.pid, signal.SIGTERM)
        assert toy.wait() == 143
        assert toy.folder is not None
        assert not toy.folder.exists()
        assert any(span["trace_id"] == reply.trace_id for span in receiver.spans)


def test_nothing_is_left_of_a_rerun_notebook(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        traces, ring_folders = [], set()
        for _ in range(4):
            traces.append(toy.chat().trace_id)
            ring_folders.add(toy.state()["folder"])
            assert toy.post("/reinstrument").body["instrumented"] is True
        traces.append(toy.chat().trace_id)
        ring_folders.add(toy.state()["folder"])
        wait_until(lambda: len(toy.sidecars()) == 1)
        wait_until(lambda: sum(Path(folder).exists() for folder in ring_folders) == 1)
        assert set(traces) <= {span["trace_id"] for span in wait_for_traces(receiver, traces)}
        assert len(toy.read_log().splitlines()) == 5
        toy.stop()
        assert not any(Path(folder).exists() for folder in ring_folders)


def wait_for_traces(receiver: OtlpReceiver, traces: list[str]) -> list[dict[str, Any]]:
    assert receiver.wait_for(lambda it: set(traces) <= {span["trace_id"] for span in it.spans})
    return receiver.spans


def test_nothing_is_left_of_rerun_in_process_notebook(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", {**receiver.environ, "OTEL_INFER_MODE": "in-process"}) as toy:
        traces = []
        for _ in range(3):
            traces.append(toy.chat().trace_id)
            assert toy.post("/reinstrument").body["instrumented"] is True
        wait_for_traces(receiver, traces)
        assert toy.state()["threads"].count("otel_infer") == 0
        assert len([name for name in toy.state()["threads"] if "otel_infer" in name]) == 0
        toy.stop()


APP = """
import json, os
import otel_infer
otel_infer.instrument()

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    with otel_infer.request("chat", model="toy", headers=headers):
        pass
    body = json.dumps({"pid": os.getpid(), "version": VERSION}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})

VERSION = 1
"""


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
def test_nothing_is_left_after_a_reload(
    tmp_path: Path, receiver: OtlpReceiver, launcher: tuple[str, ...]
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    (tmp_path / "reloaded.py").write_text(APP)
    port = free_port()
    toy = Toy(tmp_path / "log", {**receiver.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    toy.port = port
    options = f"--host 127.0.0.1 --port {port} --reload --reload-delay 0.1 --log-level warning"
    toy.command = [*launcher, sys.executable, "-m", "uvicorn", "reloaded:app", *options.split()]
    try:
        toy.start(cwd=tmp_path)
        first = toy.chat().body
        sidecar = toy.sidecar()
        (tmp_path / "reloaded.py").write_text(APP.replace("VERSION = 1", "VERSION = 2"))
        wait_until(lambda: toy.chat().body.get("version") == 2)
        second = toy.chat()
        assert second.body["pid"] != first["pid"]
        wait_until(lambda: len(toy.sidecars()) == 1)
        # Under `otel-infer run` the sidecar outlives the server process; otherwise each server process has its own.
        assert (toy.sidecar() == sidecar) is bool(launcher)
        wait_for_traces(receiver, [second.trace_id])
        toy.stop(signal.SIGINT)
        assert toy.sidecars() == []
    finally:
        toy.__exit__()


def test_concurrent_servers_each_have_their_sidecar(tmp_path: Path, receiver: OtlpReceiver) -> None:
    """A server must not take the incomplete folder of another server for a leftover."""
    script = """
import sys, otel_infer
otel_infer.instrument()
with otel_infer.request("chat", model="toy"):
    pass
from otel_infer._bootstrap.install import installation
print(installation.folder)
sys.exit(not otel_infer.flush(20))
"""
    mark = tmp_path.name
    environ = environment(**receiver.environ, **{MARK: mark})
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    ring_folders = [Path(process.communicate(timeout=40)[0].strip()) for process in started]
    assert [0] * 8 == [process.returncode for process in started]
    wait_until(lambda: not processes(mark))
    assert not any(folder.exists() for folder in ring_folders)
    roots = [span for span in receiver.spans if span["name"] == "chat toy"]
    assert len({span["trace_id"] for span in roots}) == 8 == len(roots)


# ── a separate sidecar ───────────────────────────────────────────────────────────────────────────────────────────


def test_separate_sidecar_leaves_other_files_of_its_folder(tmp_path: Path, receiver: OtlpReceiver) -> None:
    volume = Path("/dev/shm") / f"otel-infer-test-{os.getpid()}"
    beside = volume / "beside"
    beside.mkdir(parents=True)
    other_files = [volume / "weights.bin", beside / "data.requests", beside / "sidecar.notes"]
    for path in other_files:
        path.write_text("not ours")
        os.utime(path.parent, (1, 1))
    volume.chmod(0o777)
    os.utime(beside, (1, 1))
    environ = {**receiver.environ, "OTEL_INFER_RINGS": str(volume)}
    command = [*COMMAND, "sidecar", "--rings", str(volume)]
    separate = subprocess.Popen(command, env=environment(**environ), stderr=subprocess.PIPE, text=True)
    toy = Toy(tmp_path / "log", environ)
    try:
        rings = volume / f"otel_infer-{os.getuid()}"
        wait_until((rings / directory.SIDECAR_LOCK).exists)
        toy.start()
        replies = [toy.chat() for _ in range(3)]
        assert toy.state()["folder"] == str(rings)
        assert toy.sidecars() == []
        wait_for_traces(receiver, [reply.trace_id for reply in replies])
        toy.kill()
        assert toy.process is not None
        toy.process.wait(5)
        wait_until(lambda: not list(rings.glob("*.requests")))
        toy.start()
        wait_for_traces(receiver, [toy.chat().trace_id])
        separate.send_signal(signal.SIGTERM)
        assert separate.wait(15) == 0
        toy.folder = None
        toy.stop()
        assert volume.stat().st_mode & 0o777 == 0o777
        assert [path.read_text() for path in other_files] == ["not ours"] * 3
        assert not (beside / directory.SIDECAR_LOCK).exists()
    finally:
        separate.kill()
        toy.__exit__()
        subprocess.run(["rm", "-r", str(volume)], check=True)


def test_separate_sidecar_exits_with_2_on_invalid_arguments(tmp_path: Path) -> None:
    not_tmpfs = run(*COMMAND, "sidecar", "--rings", "/proc", **UNREACHABLE)
    assert not_tmpfs.returncode == 2
    assert "/proc" in not_tmpfs.stderr
    assert "Traceback" not in not_tmpfs.stderr
    invalid = run(*COMMAND, "sidecar", "--rings", "/dev/shm", OTEL_INFER_STEPS="some", **UNREACHABLE)
    assert invalid.returncode == 2
    assert "OTEL_INFER_STEPS" in invalid.stderr


def test_log_and_tape_paths_are_relative_to_server(tmp_path: Path, receiver: OtlpReceiver) -> None:
    toy = Toy(
        tmp_path / "log", {**receiver.environ, "OTEL_INFER_TAPE": "a.tape", "OTEL_INFER_LOG": "side.log"}
    )
    try:
        toy.start(cwd=tmp_path)
        reply = toy.chat()
        toy.state()
        wait_for_traces(receiver, [reply.trace_id])
        toy.stop()
    finally:
        toy.__exit__()
    done = run(*COMMAND, "replay", "--json", str(tmp_path / "a.tape"))
    assert [json.loads(line)["trace_id"] for line in done.stdout.splitlines()] == [reply.trace_id]
    assert (tmp_path / "side.log").exists()
