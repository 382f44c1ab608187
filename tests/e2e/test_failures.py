"""What goes wrong around a server goes wrong for real here, and the server serves on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived, assert_nothing_came_twice, counted, lost, requests_of
from tests.support.otlp_receiver import OtlpReceiver, ok, partial_success, slow, status
from tests.support.served import chat, transformers_serve
from tests.support.toy_server import RUN, Toy, processes, traceparent, until

pytestmark = pytest.mark.timeout(60)

LAUNCHERS = pytest.mark.parametrize("launcher", [(), RUN], ids=["one-line", "otel-infer-run"])
NOBODY = 65534

Start = Callable[..., Toy]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def start(tmp_path: Path, receiver: OtlpReceiver) -> Iterator[Start]:
    """Starts a toy server that exports to the receiver; whatever becomes of it, nothing of it is left."""
    started: list[Toy] = []

    def start(launcher: Sequence[str] = (), options: dict[str, Any] | None = None, **environ: str) -> Toy:
        toy = Toy(tmp_path / f"toy-{len(started)}.log", {**receiver.environ, **environ}, launcher)
        started.append(toy)
        return toy.start(**(options or {}))

    yield start
    for toy in started:
        toy.__exit__()


def answered(replies: Sequence[Any]) -> list[str]:
    """The traces of the requests that were answered."""
    return [reply.trace_id for reply in replies if reply.status == 200]


def memory_of(pid: int) -> int:
    """Resident memory, bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


# ── kill -9 ──────────────────────────────────────────────────────────────────────────────────────────────────────


@LAUNCHERS
def test_a_server_killed_under_load_leaves_no_request_untold(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start(launcher, TOY_STEP_S="0.02")
    toy.state()
    with toy.load(threads=3, tokens=1000) as endless, toy.load(threads=4, tokens=10) as replies:
        time.sleep(1.2)
        toy.kill()
        time.sleep(0.3)
    toy.wait()
    assert toy.folder is not None
    assert not toy.folder.exists()
    done = answered(replies)
    spans = arrived(receiver, *done)
    assert not any("error.type" in span["attributes"] for span in spans)
    cut_off = arrived(receiver, *[reply.trace_id for reply in endless[:3]])
    died = [
        span for spans in requests_of(receiver).values() for span in spans if span["trace_id"] not in done
    ]
    assert 3 <= len(died) <= 7
    assert all(span in died for span in cut_off)
    assert {span["attributes"]["error.type"] for span in died} == {"process_died"}
    assert {span["attributes"][semconv.FAILED_STAGE] for span in died} <= {"prefill", "decode", "queue"}
    assert {span["status"] for span in died} == {2}
    assert_nothing_came_twice(receiver)
    assert counted(receiver) == len(done) + len(died)


@LAUNCHERS
def test_a_sidecar_killed_under_load_is_replaced_and_nothing_is_told_twice(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start(launcher, TOY_STEP_S="0.02")
    assert toy.chat().status == 200
    first = toy.sidecar()
    toy.state()
    with toy.load(threads=4, tokens=4) as replies:
        time.sleep(1.5)
        across = [
            subprocess.Popen(  # clients of their own, since they wait for long
                [sys.executable, "-c", LONG, str(toy.port), traceparent()[0]], stdout=subprocess.PIPE
            )
            for _ in range(3)
        ]
        time.sleep(0.7)
        os.kill(first, signal.SIGKILL)
        second = until(lambda: [pid for pid in toy.sidecars() if pid != first])
        time.sleep(2)
    long_ones = [process.communicate(timeout=20)[0].decode().strip() for process in across]
    assert toy.stop() == 143
    assert len(second) == 1
    assert all(reply.status == 200 for reply in replies)
    # What was in flight across the restart has its trace, with its steps.
    for span in arrived(receiver, *long_ones):
        assert "error.type" not in span["attributes"]
    steps = Counter(s["trace_id"] for s in receiver.spans if s["name"] == semconv.SPAN_DECODE_STEP)
    assert {steps[trace_id] for trace_id in long_ones} == {79}
    assert_nothing_came_twice(receiver)
    told = requests_of(receiver)
    missing = [reply for reply in replies if reply.trace_id not in told]
    # Only what had just been concluded, and lay in the dead sidecar's memory, is gone.
    assert len(missing) <= len(replies) // 2
    assert counted(receiver) <= len(replies) + len(long_ones) + 1
    instances = {span["resource"]["service.instance.id"] for span in receiver.spans}
    assert len(instances) == 1


LONG = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=20)
connection.request("POST", "/chat", json.dumps({"tokens": 80}), {"traceparent": f"00-{sys.argv[2]}-00f067aa0ba902b7-01"})
assert connection.getresponse().status == 200
print(sys.argv[2])
"""


def test_a_sidecar_that_keeps_breaking_is_started_ever_more_seldom_and_said_to_break(start: Start) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-failures-") as rings:
        Path(rings, "sidecar.lock").mkdir()  # what no sidecar can take
        toy = start(OTEL_INFER_RINGS=rings)
        seen: set[int] = set()
        began = time.monotonic()
        while toy.said().count("the sidecar broke") < 2:
            assert toy.chat().status == 200
            seen |= set(toy.sidecars())
            assert time.monotonic() - began < 30
        assert len(seen) <= 3
        assert time.monotonic() - began > 3  # the second one after 1 s, the third one after another 2 s
        toy.kill()
        toy.wait()


def test_the_port_can_be_bound_again_at_once_after_kill_9(start: Start) -> None:
    toy = start()
    assert toy.chat().status == 200
    sidecar = toy.sidecar()
    toy.kill()
    assert toy.process is not None
    toy.process.wait(5)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
        listener.bind(("127.0.0.1", toy.port))
        listener.listen()
        assert sidecar in toy.sidecars()
    toy.wait()


def test_a_stopped_sidecar_does_not_stop_the_server(start: Start, receiver: OtlpReceiver) -> None:
    toy = start()
    first = toy.chat()
    sidecar = toy.sidecar()
    arrived(receiver, first.trace_id)
    with toy.load() as before:
        time.sleep(1)
    os.kill(sidecar, signal.SIGSTOP)
    began = time.monotonic()
    with toy.load() as during:
        time.sleep(1.5)
    assert toy.ask("/flush", {"timeout": 0.2}).body["flushed"] is False
    assert time.monotonic() - began < 5
    assert toy.sidecars() == [sidecar]
    os.kill(sidecar, signal.SIGCONT)
    assert all(reply.status == 200 for reply in during)
    assert max(reply.seconds for reply in during) < 1
    arrived(receiver, *answered([*before, *during]))
    toy.stop()
    assert_nothing_came_twice(receiver)


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────

needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="mount and pid namespaces cannot be made here (needs root or CAP_SYS_ADMIN)",
)


def in_a_mount_namespace(prepare: str) -> tuple[str, ...]:
    """A launcher that changes what is mounted, for what it starts alone."""
    return ("unshare", "--mount", "sh", "-ec", f'{prepare}\nexec "$@"', "sh")


@needs_mounts
def test_what_was_in_flight_in_a_killed_container_is_told_by_the_next_start(
    start: Start, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    script = 'mount -t tmpfs rings /dev/shm\nunshare --pid --fork --mount-proc "$@" || true\nexec "$@"'
    toy = start(("unshare", "--mount", "sh", "-c", script, "sh"), TOY_STEP_S="0.02")
    assert toy.state()["pid"] == 1
    with toy.load(threads=3, tokens=100) as replies:
        time.sleep(1)
        (init,) = [pid for pid, argv in processes(toy.mark).items() if _is_init(pid)]
        os.kill(init, signal.SIGKILL)
        time.sleep(0.3)
    toy.wait_until_ready()
    assert toy.state()["pid"] != 1
    assert toy.chat().status == 200
    broken = [reply.trace_id for reply in replies if reply.status == 0][:3]
    spans = arrived(receiver, *broken)
    assert {span["attributes"]["error.type"] for span in spans} == {"process_died"}
    leftovers = subprocess.run(
        ["nsenter", "--mount", "--target", str(toy.state()["pid"]), "sh", "-c", "ls /dev/shm/otel_infer-*"],
        capture_output=True,
        text=True,
    )
    assert len(leftovers.stdout.split()) == 1
    toy.folder = None  # it went with its namespace
    toy.stop()
    assert_nothing_came_twice(receiver)


def _is_init(pid: int) -> bool:
    """Whether a process is the first of a pid namespace below ours."""
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        (numbers,) = [line.split()[1:] for line in lines if line.startswith("NSpid:")]
    return len(numbers) > 1 and numbers[-1] == "1"


@needs_mounts
@LAUNCHERS
def test_one_megabyte_of_shared_memory_is_enough(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start((*in_a_mount_namespace("mount -t tmpfs -o size=1m small /dev/shm"), *launcher))
    reply = toy.chat()
    assert toy.state()["arena"] == "FileArena"
    with toy.load() as replies:
        time.sleep(1)
    arrived(receiver, reply.trace_id, *answered(replies))
    assert "decode step" in {span["name"] for span in receiver.spans if span["trace_id"] == reply.trace_id}
    toy.folder = None
    toy.stop()


WITHOUT_MEMORY = {
    "full": "mount -t tmpfs -o size=1m full /dev/shm\nhead -c 1m /dev/zero >/dev/shm/full || true",
    "too-small": "mount -t tmpfs -o size=64k small /dev/shm",
    "read-only": "mount -t tmpfs -o ro none /dev/shm\nmount -o remount,ro,bind / /",
    "not-tmpfs": "mount --bind /var/tmp /dev/shm",
}


@needs_mounts
@pytest.mark.parametrize(
    ("prepare", "launcher"),
    [*((name, ()) for name in WITHOUT_MEMORY), ("full", RUN), ("read-only", RUN)],
)
def test_without_shared_memory_the_server_exports_by_itself_and_says_so(
    start: Start, receiver: OtlpReceiver, prepare: str, launcher: Sequence[str]
) -> None:
    toy = start((*in_a_mount_namespace(WITHOUT_MEMORY[prepare]), *launcher))
    replies = [toy.chat() for _ in range(5)]
    assert toy.state()["arena"] == "MemoryArena"
    arrived(receiver, *answered(replies))
    assert toy.said().count("in-process, since ") == 1
    assert "/dev/shm" in toy.said() or "shared memory" in toy.said()
    toy.stop()
    assert "Traceback" not in toy.said()
    assert len(toy.said().splitlines()) <= 2


def open_to_nobody() -> tuple[str, ...]:
    """A launcher under which our interpreter can be reached by every user, even from a home that is closed to them."""
    prefix = Path(sys.base_prefix)
    closed = next((path for path in reversed(prefix.parents) if not path.stat().st_mode & 0o001), None)
    if closed is None:
        return in_a_mount_namespace("true")
    staging = "/dev/shm/otel_infer-python"
    return in_a_mount_namespace(
        f"mount -t tmpfs shm /dev/shm\nmkdir {staging}\nmount --bind {prefix} {staging}\n"
        f"mount -t tmpfs home {closed}\nmkdir -p {prefix}\nmount --move {staging} {prefix}\n"
        f"chmod 755 {closed}\nchmod 1777 /dev/shm"
    )


AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@pytest.fixture(scope="module")
def opened() -> tuple[str, ...]:
    """`open_to_nobody`, if it works here."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root becomes another user")
    launcher = open_to_nobody()
    tried = [*launcher, *AS_NOBODY, "sh", "-c", f'"{sys.executable}" -c "import otel_infer"']
    if subprocess.run(tried, capture_output=True, cwd="/").returncode != 0:
        pytest.skip(f"user {NOBODY} cannot run {sys.executable}")
    return launcher


@needs_mounts
def test_another_user_has_a_folder_of_its_own(
    start: Start, receiver: OtlpReceiver, opened: tuple[str, ...]
) -> None:
    toy = start((*opened, *AS_NOBODY))
    reply = toy.chat()
    assert toy.state()["arena"] == "FileArena"
    folder = Path(f"/proc/{toy.state()['pid']}/root") / toy.state()["folder"].lstrip("/")
    assert folder.parent.name == f"otel_infer-{NOBODY}"
    assert folder.stat().st_uid == NOBODY
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(toy.sidecars()) == 1
    arrived(receiver, reply.trace_id)
    toy.stop()


@needs_mounts
@LAUNCHERS
def test_a_child_that_gives_up_its_rights_is_recorded_too(
    start: Start, receiver: OtlpReceiver, opened: tuple[str, ...], launcher: Sequence[str]
) -> None:
    toy = start((*opened, *launcher))
    reply = toy.ask("/chat", {"fork": {"requests": 2, "uid": NOBODY}})
    assert receiver.wait_for(lambda it: len(requests_of(it).get(reply.trace_id, ())) == 3, 25)
    toy.stop()
    assert_nothing_came_twice(receiver)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


@LAUNCHERS
@pytest.mark.parametrize("mode", ["sidecar", "in-process"])
def test_a_fork_under_load_is_a_process_of_its_own(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str], mode: str
) -> None:
    toy = start(launcher, OTEL_INFER_MODE=mode)
    assert toy.chat().status == 200
    folder = toy.state()["folder"]
    with toy.load() as replies:
        forks = [toy.ask("/chat", {"fork": {"requests": 3}}) for _ in range(3)]
        assert [200, 200, 200] == [reply.status for reply in forks]
        time.sleep(0.5)
        if mode == "sidecar":
            assert len(toy.sidecars()) == 1
    spans = arrived(receiver, *answered(replies))
    for reply in forks:
        # The parent's request, and below it those that the child made while it thought itself inside.
        assert receiver.wait_for(
            lambda it, reply=reply: len(requests_of(it).get(reply.trace_id, ())) == 4, 25
        )
        family = requests_of(receiver)[reply.trace_id]
        (parent,) = [span for span in family if span["attributes"].get("who") == "parent"]
        children = [span for span in family if span is not parent]
        assert {span["parent_span_id"] for span in children} == {parent["span_id"]}
        assert {span["attributes"].get("who") for span in children} == {"child"}
        spans += family
    assert {span["attributes"].get("error.type") for span in spans} == {None}
    assert not any(span["attributes"].get(semconv.TELEMETRY_LOST) for span in spans)
    assert toy.state()["folder"] == folder
    toy.stop()
    assert_nothing_came_twice(receiver)


@LAUNCHERS
def test_a_spawned_process_reaches_the_same_sidecar(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start(launcher)
    reply = toy.chat()
    sidecar = toy.sidecar()
    toy.state()
    trace_id, _, headers = traceparent()
    spawned = toy.ask("/spawn", {"headers": headers})
    assert spawned.body["status"] == 0
    assert toy.sidecars() == [sidecar]
    (there, here) = arrived(receiver, reply.trace_id, trace_id)
    assert there["resource"]["service.instance.id"] == here["resource"]["service.instance.id"]
    toy.stop()


def test_two_servers_on_one_host_have_nothing_in_common(start: Start, receiver: OtlpReceiver) -> None:
    one, other = start(), start()
    spans = arrived(receiver, one.chat().trace_id, other.chat().trace_id)
    assert one.state()["folder"] != other.state()["folder"]
    assert len({span["resource"]["service.instance.id"] for span in spans}) == 2
    assert {one.sidecar()} != {other.sidecar()}
    one.kill()
    one.wait()
    assert other.chat().status == 200
    assert other.folder is not None
    assert other.folder.exists()
    other.stop()


def test_under_opentelemetry_instrument_there_is_one_sidecar_and_it_instruments_nothing(
    start: Start, receiver: OtlpReceiver
) -> None:
    program = Path(sys.executable).parent / "opentelemetry-instrument"
    if not program.exists():
        pytest.skip("opentelemetry-instrument is not installed")
    toy = start((str(program),))
    reply = toy.chat()
    toy.state()
    arrived(receiver, reply.trace_id)
    sidecar = toy.sidecar()
    time.sleep(0.5)
    assert toy.sidecars() == [sidecar]
    assert len(processes(toy.mark)) == 2
    maps = Path(f"/proc/{sidecar}/maps").read_text()
    environ = Path(f"/proc/{sidecar}/environ").read_bytes()
    assert b"PYTHONPATH" not in environ
    assert "wrapt" not in maps or "auto_instrumentation" not in maps
    toy.stop()


def test_a_ring_folder_removed_under_load_costs_no_request(start: Start, receiver: OtlpReceiver) -> None:
    toy = start()
    first = toy.chat()
    sidecar = toy.sidecar()
    folder = Path(toy.state()["folder"])
    arrived(receiver, first.trace_id)
    with toy.load() as replies:
        shutil.rmtree(folder)
        time.sleep(1.5)
    # The one who reads has the files open: nothing is lost as long as it lives.
    arrived(receiver, *answered(replies))
    with toy.load() as more:
        os.kill(sidecar, signal.SIGKILL)
        until(lambda: toy.sidecars() not in ([], [sidecar]), 20)
        time.sleep(0.5)
    after = [toy.chat() for _ in range(3)]
    assert all(reply.status == 200 for reply in [*replies, *more, *after])
    arrived(receiver, *answered(after))
    assert len(toy.sidecars()) == 1
    toy.stop()
    assert_nothing_came_twice(receiver)
    assert not folder.exists()


# ── the collector ────────────────────────────────────────────────────────────────────────────────────────────────

ANSWERS: dict[str, Any] = {
    "absent": None,
    "slow": slow(3),
    "500": status(500),
    "refusing": status(401),
    "partial": partial_success(5, "too many"),
}


@pytest.mark.parametrize(
    ("mode", "answer"),
    [*(("sidecar", name) for name in ANSWERS), ("in-process", "absent"), ("in-process", "500")],
)
def test_a_collector_that_fails_costs_no_request_and_its_losses_are_counted(
    start: Start, receiver: OtlpReceiver, answer: str, mode: str
) -> None:
    with OtlpReceiver() as failing:
        if answer == "absent":
            failing.refuse()
        else:
            failing.answer(ANSWERS[answer])
        toy = start(
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{failing.endpoint}/v1/traces",
            OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="1",
            OTEL_INFER_MODE=mode,
        )
        toy.state()
        with toy.load(tokens=2) as replies:
            time.sleep(1)
        reader = toy.sidecar() if mode == "sidecar" else toy.state()["pid"]
        used = memory_of(reader)
        more: list[Any] = []
        waits = []
        for _ in range(3):  # others on the machine hold up a server as well, but not every time
            with toy.load(tokens=2) as some:
                time.sleep(1.5)
            more += some
            waits.append(max(reply.seconds for reply in some))
            if waits[-1] < 1:
                break
        grown = memory_of(reader) - used
        assert all(reply.status == 200 for reply in [*replies, *more])
        assert min(waits) < 1, waits
        assert statistics.median(reply.seconds for reply in more) < 0.2
        assert grown < 64 << 20
        toy.stop()
        assert receiver.wait_for(lambda it: lost(it).get("refused", 0) > 0, 5)
        assert counted(receiver) == len(replies) + len(more)
        assert failing.spans == [] or answer in ("partial", "slow")


def test_a_flush_that_waits_for_a_stuck_collector_stops_nobody_from_reading(
    start: Start, receiver: OtlpReceiver
) -> None:
    receiver.answer(slow(2.5))
    toy = start(TOY_STEP_S="0.001")
    toy.chat()
    toy.state()
    with toy.load(threads=8, tokens=50) as replies:
        time.sleep(0.7)
        began = time.monotonic()
        assert toy.ask("/flush", {"timeout": 1.5}).body["flushed"] is False
        assert 1.5 <= time.monotonic() - began < 3.0
    receiver.answer(ok())
    spans = arrived(receiver, *answered(replies))
    assert not any(span["attributes"].get(semconv.TELEMETRY_LOST) for span in spans)
    toy.stop()


def test_a_collector_that_comes_back_gets_what_came_since(start: Start, receiver: OtlpReceiver) -> None:
    receiver.refuse()
    toy = start(OTEL_EXPORTER_OTLP_TIMEOUT="1")
    toy.chat()
    toy.state()
    time.sleep(3)
    receiver.listen()
    reply = toy.chat()
    arrived(receiver, reply.trace_id)
    toy.stop()


# ── a real engine ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_real_server_outlives_its_sidecar_and_its_death_is_told(
    receiver: OtlpReceiver, tiny_llama: Path, tmp_path: Path
) -> None:
    import threading

    environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "500"}
    with transformers_serve(tiny_llama, tmp_path / "serve.log", environ, batching=True) as server:
        chat(server.port, tiny_llama)
        assert server.process is not None
        supervisor = server.process.pid
        first = _children(supervisor, b"otel_infer-sidecar")[0]
        (served,) = [pid for pid in _children(supervisor) if pid != first]
        os.kill(first, signal.SIGKILL)
        until(lambda: _children(supervisor, b"otel_infer-sidecar"))
        reply = chat(server.port, tiny_llama, tokens=6)
        arrived(receiver, reply.trace_id)
        clients = [
            threading.Thread(target=_cut_off, args=(server.port, tiny_llama), daemon=True) for _ in range(4)
        ]
        for client in clients:
            client.start()
        time.sleep(0.5)
        os.kill(served, signal.SIGKILL)
        assert server.process.wait(20) == 128 + signal.SIGKILL
        for client in clients:
            client.join(10)
    died = [s for spans in requests_of(receiver).values() for s in spans if "error.type" in s["attributes"]]
    assert len(died) == 4
    assert {span["attributes"]["error.type"] for span in died} == {"process_died"}
    assert_nothing_came_twice(receiver)


def _children(parent: int, name: bytes = b"") -> list[int]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _cut_off(port: int, model: Path) -> None:
    """A client whose server dies."""
    try:
        chat(port, model, tokens=400)
    except Exception:
        pass
