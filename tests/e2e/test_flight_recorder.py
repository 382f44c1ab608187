"""The last two minutes of a running server as a tape: on a command, a signal, an alert or a breach."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_infer.ringbuffer import directory
from otel_infer.sidecar.recording import file
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import free_port
from tests.support.toy_server import RUN, Toy, wait_until

pytestmark = pytest.mark.timeout(90)

COMMAND = (sys.executable, "-m", "otel_infer")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def run(*arguments: str, cwd: Path | None = None, **environ: str) -> Any:
    """Runs an otel-infer command to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=cwd, env={**inherited, **environ}
    )


def read_traces(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the requests of a tape by trace id, from `otel-infer replay`."""
    done = run("replay", "--json", str(path))
    assert done.returncode == 0, done.stderr
    requests = [json.loads(line) for line in done.stdout.splitlines()]
    return {request["trace_id"]: request for request in requests}


def tapes(folder: Path) -> list[Path]:
    return sorted(folder.glob("otel_infer-*.tape"))


def non_empty_tapes(folder: Path) -> list[Path]:
    """Returns the tapes that are not empty. A tape may be removed meanwhile."""
    found = []
    for path in tapes(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size:
                found.append(path)
    return found


def wait_for_rings(toy: Toy) -> str:
    """Returns the ring folder of a server once its sidecar runs."""
    folder = str(toy.state()["folder"])
    wait_until(lambda: directory.is_held(Path(folder) / directory.SIDECAR_LOCK))
    return folder


def handles_signals(pid: int) -> bool:
    """Returns whether the process has a handler for SIGUSR2."""
    (caught,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    ]
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
def test_dump_writes_a_replayable_tape(
    tmp_path: Path, receiver: OtlpReceiver, launcher: tuple[str, ...]
) -> None:
    with Toy(tmp_path / "log", receiver.environ, launcher) as toy:
        replies = [toy.chat(tokens=5) for _ in range(4)]
        folder = wait_for_rings(toy)
        out = tmp_path / "slow.tape"
        done = run("dump", "--out", str(out), "--rings", folder)
        assert done.returncode == 0, done.stderr
        assert str(out) in done.stdout
        found = read_traces(out)
        assert set(found) == {reply.trace_id for reply in replies}
        assert {request["output_tokens"] for request in found.values()} == {5}
        assert not any(request["infer.telemetry.lost"] for request in found.values())
        assert run("explain", str(out)).returncode == 0
        assert out.stat().st_mode & 0o077 in (0o044, 0o000, 0o004)  # by the umask of this user
        assert not [name for name in os.listdir(folder) if directory.is_dump(name)]
        again = run("dump", cwd=tmp_path, OTEL_INFER_RINGS=folder)
        assert again.returncode == 0, again.stderr
        (named,) = tapes(tmp_path)
        assert set(read_traces(named)) == set(found)
        toy.stop()


def test_tape_under_load_has_all_steps_of_requests(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy, toy.load(threads=2, tokens=100) as replies:
        wait_until(toy.sidecars)
        folder = wait_for_rings(toy)
        wait_until(lambda: len(replies) >= 2)
        done = run("dump", "--out", str(tmp_path / "a.tape"), "--rings", folder)
        assert done.returncode == 0, done.stderr
        found = read_traces(tmp_path / "a.tape")
        assert len(found) >= 2
        assert {request["output_tokens"] for request in found.values()} == {100}


def test_dump_without_a_sidecar_is_an_error(tmp_path: Path) -> None:
    done = run("dump", "--rings", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert f"no sidecar is running below {tmp_path}" in done.stderr
    assert tapes(tmp_path) == []


def test_dump_requires_a_choice_among_several_servers(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "a", receiver.environ) as first, Toy(tmp_path / "b", receiver.environ) as second:
        chosen, other = first.chat(), second.chat()
        pid, parent = first.state()["pid"], str(Path(wait_for_rings(first)).parent)
        wait_for_rings(second)
        out = tmp_path / "first.tape"
        ambiguous = run("dump", "--out", str(out), "--rings", parent)
        assert ambiguous.returncode == 2
        assert f"--server {pid} " in ambiguous.stderr
        assert not out.exists()
        done = run("dump", "--out", str(out), "--rings", parent, "--server", str(pid))
        assert done.returncode == 0, done.stderr
        assert set(read_traces(out)) == {chosen.trace_id}
        assert other.trace_id not in read_traces(out)
        unknown = run("dump", "--out", str(out), "--rings", parent, "--server", "1")
        assert unknown.returncode == 2
        assert "no sidecar" in unknown.stderr
        first.stop()
        second.stop()


def test_dump_names_a_file_that_cannot_be_written(tmp_path: Path, receiver: OtlpReceiver) -> None:
    with Toy(tmp_path / "log", receiver.environ) as toy:
        toy.chat()
        folder = wait_for_rings(toy)
        done = run("dump", "--out", str(tmp_path / "nowhere" / "a.tape"), "--rings", folder)
        assert done.returncode == 2
        assert "nowhere" in done.stderr
        assert "Traceback" not in done.stderr
        toy.stop()


def test_dump_reads_from_a_separate_sidecar(tmp_path: Path, receiver: OtlpReceiver) -> None:
    rings = Path("/dev/shm") / f"otel-infer-test-dump-{os.getpid()}"
    rings.mkdir(mode=0o777)
    rings.chmod(0o777)
    environ = {**receiver.environ, "OTEL_INFER_RINGS": str(rings)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    separate = subprocess.Popen([*COMMAND, "sidecar", "--rings", str(rings)], env={**inherited, **environ})
    toy = Toy(tmp_path / "log", environ)
    try:
        wait_until((rings / f"otel_infer-{os.getuid()}" / directory.SIDECAR_LOCK).exists)
        toy.start()
        reply = toy.chat()
        done = run("dump", "--out", str(tmp_path / "a.tape"), "--rings", str(rings))
        assert done.returncode == 0, done.stderr
        assert set(read_traces(tmp_path / "a.tape")) == {reply.trace_id}
        separate.send_signal(signal.SIGTERM)
        assert separate.wait(15) == 0
        toy.stop()
    finally:
        separate.kill()
        separate.wait()
        toy.__exit__()
        subprocess.run(["rm", "-r", str(rings)], check=True)


# ── the signal ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_signal_writes_a_tape_into_a_private_folder(tmp_path: Path, receiver: OtlpReceiver) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with Toy(tmp_path / "log", {**receiver.environ, "TMPDIR": str(temporary)}) as toy:
        reply = toy.chat()
        toy.state()
        sidecar = toy.sidecar()
        wait_until(lambda: handles_signals(sidecar))
        os.kill(sidecar, signal.SIGUSR2)
        folder = temporary / f"otel_infer-{os.getuid()}"
        (path,) = wait_until(lambda: tapes(folder))
        assert folder.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600
        assert set(read_traces(path)) == {reply.trace_id}
        assert file.read_header(path)["by"] == "signal"
        assert toy.chat().status == 200
        assert toy.sidecars() == [sidecar]
        toy.stop()


# ── objectives ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_breach_writes_one_tape_with_earlier_requests(tmp_path: Path, receiver: OtlpReceiver) -> None:
    folder = tmp_path / "tapes"
    folder.mkdir()
    for number in range(20):
        (folder / f"otel_infer-20000101T0000{number:02d}.000000Z-slo-1.tape").touch()
    environ = {**receiver.environ, "OTEL_INFER_SLO": "e2e=200ms", "OTEL_INFER_DUMP_ON_SLO": str(folder)}
    with Toy(tmp_path / "log", environ) as toy:
        fine = [toy.chat(tokens=2) for _ in range(3)]
        missed = [toy.chat(tokens=40) for _ in range(2)]
        time.sleep(1.0)
        assert len(tapes(folder)) == 20
        missed += [toy.chat(tokens=40) for _ in range(2)]
        (path,) = wait_until(lambda: non_empty_tapes(folder))
        found = read_traces(path)
        assert {reply.trace_id for reply in [*fine, *missed]} <= set(found)
        missed += [toy.chat(tokens=40) for _ in range(3)]
        time.sleep(3.0)
        assert non_empty_tapes(folder) == [path]  # at most one per minute
        assert len(tapes(folder)) == 20  # the oldest tape was removed
        toy.stop()
    assert file.read_header(path)["by"] == "slo"


@pytest.mark.parametrize("flags", ["01", "00"], ids=["sampled", "not sampled"])
def test_breach_just_before_shutdown_is_written(tmp_path: Path, receiver: OtlpReceiver, flags: str) -> None:
    folder = tmp_path / "tapes"
    environ = {**receiver.environ, "OTEL_INFER_SLO": "e2e=1ms", "OTEL_INFER_DUMP_ON_SLO": str(folder)}
    with Toy(tmp_path / "log", environ) as toy:
        replies = [toy.chat(flags=flags) for _ in range(3)]
        toy.state()
        toy.stop()
    (path,) = tapes(folder)
    assert file.read_header(path)["slo"] == "e2e=1ms"
    assert set(read_traces(path)) == {reply.trace_id for reply in replies}


# ── the webhook ──────────────────────────────────────────────────────────────────────────────────────────────────


def post(port: int, path: str, body: str, headers: Mapping[str, str] = {}) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_webhook_tape_contains_no_user_content(tmp_path: Path, receiver: OtlpReceiver) -> None:
    folder, port, log = tmp_path / "tapes", free_port(), tmp_path / "side.log"
    environ = {
        **receiver.environ,
        "OTEL_INFER_DUMP_ON_SLO": str(folder),
        "OTEL_INFER_DUMP_PORT": str(port),
        "OTEL_INFER_LOG": str(log),
    }
    canaries = {name: f"canary-{name}-{os.urandom(6).hex()}" for name in ("prompt", "error", "alert")}
    with Toy(tmp_path / "log", environ) as toy:
        reply = toy.chat(prompt=canaries["prompt"])
        toy.chat(fail=canaries["error"])
        toy.state()
        sidecar = toy.sidecar()
        wait_until(lambda: handles_signals(sidecar))
        alert = {"status": "firing", "alerts": [{"labels": {"alertname": canaries["alert"]}}]}
        status, answer = post(port, f"/dump?q={canaries['alert']}", json.dumps(alert))
        assert status == 202
        path = Path(answer["file"])
        wait_until(path.exists)
        assert path.parent == folder
        assert reply.trace_id in read_traces(path)
        taped = gzip.decompress(path.read_bytes())
        for name, canary in canaries.items():
            assert canary.encode() not in taped, name
            assert canary.encode() not in log.read_bytes(), name
            assert canary not in str(path)
        assert _listens_on(port) == {"0100007F"}  # loopback only
        toy.stop()


def _listens_on(port: int) -> set[str]:
    """Returns the local addresses, as in /proc/net/tcp, that listen on this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def test_occupied_port_disables_only_the_webhook(tmp_path: Path, receiver: OtlpReceiver) -> None:
    log = tmp_path / "side.log"
    environ = {
        **receiver.environ,
        "OTEL_INFER_DUMP_PORT": str(receiver.port),
        "OTEL_INFER_LOG": str(log),
    }
    with Toy(tmp_path / "log", environ) as toy:
        reply = toy.chat()
        toy.state()
        assert receiver.wait_for(lambda it: reply.trace_id in {span["trace_id"] for span in it.spans})
        assert "no webhook at" in log.read_text()
        toy.stop()
