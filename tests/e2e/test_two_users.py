"""Two users on one machine: neither can read, change, delay or receive the telemetry of the other.

The server runs as root. The other user runs in forked processes, which know every path and process id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock, cli
from otel_infer.ringbuffer import dead_servers, directory, events, sidecar_claim
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.recording import dump_request
from tests.support.arrivals import arrived, lost, requests_of
from tests.support.other_process import shared_volume
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import free_port
from tests.support.toy_server import Toy, wait_until

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run as root"),
]

OTHER = 65534
REFUSED = "refused"


def as_other_user(work: Callable[[], Any]) -> Any:
    """Returns the result of `work` in a process of the other user; `REFUSED` if the kernel denied it."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process; the child starts none
        pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            try:
                result = work()
            except (PermissionError, ProcessLookupError):
                result = REFUSED
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writer, pickle.dumps(result))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as answer:
        content = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pickle.loads(content)


@pytest.fixture
def volume() -> Iterator[Path]:
    """Returns a folder on tmpfs like an emptyDir: every user may write, and there is no sticky bit."""
    with shared_volume() as folder:
        yield folder


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def toy(volume: Path, receiver: OtlpReceiver) -> Iterator[Toy]:
    """Returns a server of root with every output; its files lie in a folder that all users may write to."""
    environ = {
        **receiver.environ,
        "OTEL_INFER_RINGS": str(volume),
        "OTEL_INFER_LOG": str(volume / "side.log"),
        "OTEL_INFER_REQUEST_LOG": str(volume / "requests.log"),
        "OTEL_INFER_TAPE": str(volume / "all.tape"),
        "OTEL_INFER_METRICS_PORT": str(free_port()),
        "TOY_STEP_S": "0.01",
    }
    with Toy(volume / "toy.log", environ) as toy:
        assert toy.chat().status == 200
        assert toy.post("/flush", {"timeout": 10}).body["flushed"]
        toy.state()
        toy.sidecar()
        yield toy
        toy.folder = None  # the fixture of the volume removes it


def private_files(volume: Path) -> list[Path]:
    """Returns the files of the server: rings, what lies beside them, logs and tapes."""
    files = [path for path in volume.rglob("*") if path.is_file() and path.name != "toy.log"]
    assert {path.suffix for path in files} >= {".requests", ".steps", ".lock", ".log", ".tape"}
    return files


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_user_cannot_read_telemetry(toy: Toy, volume: Path) -> None:
    folder = volume / f"otel_infer-{os.geteuid()}"
    assert as_other_user(lambda: os.listdir(folder)) == REFUSED
    for path in private_files(volume):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert as_other_user(lambda path=path: path.read_bytes()) == REFUSED, path
    for pid in (toy.state()["pid"], toy.sidecar()):
        for name in ("environ", "mem", "maps"):
            assert (
                as_other_user(lambda name=name, pid=pid: open(f"/proc/{pid}/{name}", "rb").read(1)) == REFUSED
            )
        assert as_other_user(lambda pid=pid: os.listdir(f"/proc/{pid}/fd")) == REFUSED


# ── change ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_user_cannot_change_telemetry(toy: Toy, volume: Path) -> None:
    folder = volume / f"otel_infer-{os.geteuid()}"
    for path in private_files(volume):
        assert as_other_user(lambda path=path: os.open(path, os.O_WRONLY)) == REFUSED, path
        assert as_other_user(lambda path=path: os.truncate(path, 0)) == REFUSED, path
        assert as_other_user(lambda path=path: os.chmod(path, 0o666)) == REFUSED, path
    inside = [path for path in private_files(volume) if path.parent == folder]
    for path in inside:
        assert as_other_user(lambda path=path: os.unlink(path)) == REFUSED, path
    for name in (directory.STARTING_FILE, "9-f.requests", f"{directory.DUMP_PREFIX}{'a' * 16}.requested"):
        assert as_other_user(lambda name=name: os.mknod(folder / name)) == REFUSED


# ── delay ────────────────────────────────────────────────────────────────────────────────────────────────────────


def take_lock(path: Path) -> None:
    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)


def test_another_user_cannot_delay_telemetry(toy: Toy, volume: Path, receiver: OtlpReceiver) -> None:
    folder = volume / f"otel_infer-{os.geteuid()}"
    for path in private_files(volume):
        assert as_other_user(lambda path=path: take_lock(path)) == REFUSED
    for pid in (toy.state()["pid"], toy.sidecar()):
        assert as_other_user(lambda pid=pid: os.kill(pid, 19)) == REFUSED  # SIGSTOP
    assert as_other_user(lambda: sidecar_claim.claim_sidecar_start(folder)) == -1  # it holds nothing
    assert not sidecar_claim.is_starting(folder)
    port = int(toy.environ["OTEL_INFER_METRICS_PORT"])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    began = time.monotonic()
    reply = toy.chat()
    (span,) = arrived(receiver, reply.trace_id)
    assert "error.type" not in span["attributes"]
    with socket.create_connection(("127.0.0.1", port), timeout=4) as scrape:
        scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert scrape.recv(100).startswith(b"HTTP/1.0 200")
    assert time.monotonic() - began < 8
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_planted_folder_does_not_silence_a_server(
    tmp_path: Path, volume: Path, receiver: OtlpReceiver, kind: str
) -> None:
    """The server exports from its own process then, and creates nothing in the planted folder."""
    planted, elsewhere = volume / f"otel_infer-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    plant = {
        "folder": lambda: planted.mkdir(),
        "link": lambda: planted.symlink_to(elsewhere),
        "file": lambda: planted.write_text(""),
    }
    as_other_user(plant[kind])
    environ = {**receiver.environ, "OTEL_INFER_RINGS": str(volume)}
    with Toy(tmp_path / "log", environ) as toy:
        replies = [toy.chat() for _ in range(3)]
        arrived(receiver, *(reply.trace_id for reply in replies))
        assert toy.state()["arena"] == "MemoryArena"
        assert "belongs to another user" in toy.read_log()
        toy.folder = None
    assert os.listdir(elsewhere) == []
    assert kind != "folder" or os.listdir(planted) == []


# ── a swapped folder ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_swapped_under_a_server_gets_nothing(
    toy: Toy, volume: Path, tmp_path: Path, receiver: OtlpReceiver, kind: str
) -> None:
    """What the server records continues to arrive, or is counted; no other file of its user changes."""
    folder, home = volume / f"otel_infer-{os.geteuid()}", tmp_path / "home"
    home.mkdir(mode=0o700)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    for name in names:
        (home / name).write_text("kept")

    def swap() -> None:
        folder.rename(volume / "taken")
        if kind == "link":
            folder.symlink_to(home)
        else:
            folder.mkdir(mode=0o777)
            folder.chmod(0o777)

    as_other_user(swap)
    replies = [toy.chat() for _ in range(5)]
    time.sleep(1.2)  # the server looks after its sidecar once a second
    replies += [toy.chat() for _ in range(5)]
    assert {reply.status for reply in replies} == {200}
    toy.post("/flush", {"timeout": 10})
    missing = {reply.trace_id for reply in replies} - set(requests_of(receiver))
    assert len(missing) <= sum(lost(receiver).values())
    assert {path.name: path.read_text() for path in home.iterdir()} == dict.fromkeys(names, "kept")
    assert kind == "link" or os.listdir(folder) == []
    toy.stop()
    assert {path.name: path.read_text() for path in home.iterdir()} == dict.fromkeys(names, "kept")


def test_a_folder_swapped_before_it_was_read_silences_nobody(
    tmp_path: Path, volume: Path, receiver: OtlpReceiver
) -> None:
    """The server notices within seconds, and exports from its own process."""
    folder = volume / f"otel_infer-{os.geteuid()}"
    with Toy(tmp_path / "log", {**receiver.environ, "OTEL_INFER_RINGS": str(volume)}) as toy:
        toy.chat()
        as_other_user(lambda: folder.rename(volume / "taken"))
        as_other_user(lambda: folder.mkdir())
        arrival = [toy.chat().trace_id]

        def is_received() -> bool:
            arrival.append(toy.chat().trace_id)
            return not requests_of(receiver).keys().isdisjoint(arrival)

        wait_until(is_received, every=0.2)
        toy.folder = None
    assert os.listdir(folder) == []


# ── receive ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_user_cannot_receive_telemetry(toy: Toy, volume: Path) -> None:
    """Neither through a command, nor through a sidecar of its own, nor after the server has died."""
    folder = volume / f"otel_infer-{os.geteuid()}"
    cli.build_parser()  # imports the commands, whose files the other user may not be able to read

    def run(*command: str) -> int:
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
            return cli.main(command)

    out = volume / "stolen.tape"
    assert as_other_user(lambda: run("dump", "--rings", str(folder), "--out", str(out))) == 2
    assert as_other_user(lambda: run("explain", "--rings", str(volume))) == 2
    assert not out.exists()
    assert as_other_user(lambda: directory.find_served_folders(volume)) == []
    assert as_other_user(lambda: directory.list_writer_pids(folder)) == []
    assert as_other_user(lambda: list(dump_request.take_dump_requests(folder))) == []
    assert as_other_user(lambda: list(dead_servers.claim_dead_servers(folder / "x"))) == []
    assert as_other_user(lambda: dead_servers.holds_dead_server(folder)) is False


def test_forged_rings_of_another_user_are_not_exported(
    tmp_path: Path, volume: Path, receiver: OtlpReceiver
) -> None:
    """Rings that lie where a server looks for rings count only if they are files of its user."""
    forged = bytes([7] * 16)

    def forge() -> None:
        for folder in (volume, volume / f"otel_infer-{OTHER}"):
            folder.mkdir(exist_ok=True)
            arrived_at, wall_at = _clock.read_clocks()
            folder.chmod(0o700) if folder != volume else None
            with contextlib.suppress(Exception):
                RequestWriter(FileArena(folder), "1-a", "server").open_request(
                    events.RequestArrived(arrived_at, wall_at, forged, bytes(8), bytes(8), bytes(8), 1, "chat", "toy", "m", "n")
                )  # fmt: skip

    as_other_user(forge)
    assert list(volume.rglob("*.requests"))
    with Toy(tmp_path / "log", {**receiver.environ, "OTEL_INFER_RINGS": str(volume)}) as toy:
        arrived(receiver, toy.chat().trace_id)
        time.sleep(0.5)
        toy.folder = None
    assert forged.hex() not in requests_of(receiver)
