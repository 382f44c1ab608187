"""Real failures of the sidecar, container, processes and collector: the server continues to serve."""

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
from tests.support.toy_server import RUN, Toy, processes, traceparent, wait_until

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
    """Returns a function that starts a toy server with an export to the receiver. Teardown stops all of them."""
    started: list[Toy] = []

    def start(launcher: Sequence[str] = (), options: dict[str, Any] | None = None, **environ: str) -> Toy:
        toy = Toy(tmp_path / f"toy-{len(started)}.log", {**receiver.environ, **environ}, launcher)
        started.append(toy)
        return toy.start(**(options or {}))

    yield start
    for toy in started:
        toy.__exit__()


def answered_traces(replies: Sequence[Any]) -> list[str]:
    """Returns the trace ids of the answered requests."""
    return [reply.trace_id for reply in replies if reply.status == 200]


def memory_of(pid: int) -> int:
    """Returns the resident memory in bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


# ── kill -9 ──────────────────────────────────────────────────────────────────────────────────────────────────────


@LAUNCHERS
def test_killed_server_leaves_no_request_unreported(
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
    done = answered_traces(replies)
    spans = arrived(receiver, *done)
    assert not any("error.type" in span["attributes"] for span in spans)
    cut_off = arrived(receiver, *[reply.trace_id for reply in endless[:3]])
    killed = [
        span for spans in requests_of(receiver).values() for span in spans if span["trace_id"] not in done
    ]
    assert 3 <= len(killed) <= 7
    assert all(span in killed for span in cut_off)
    assert {span["attributes"]["error.type"] for span in killed} == {"process_died"}
    assert {span["attributes"][semconv.FAILED_STAGE] for span in killed} <= {"prefill", "decode", "queue"}
    assert {span["status"] for span in killed} == {2}
    assert_nothing_came_twice(receiver)
    assert counted(receiver) == len(done) + len(killed)


@LAUNCHERS
def test_killed_sidecar_is_replaced_without_duplicate_spans(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start(launcher, TOY_STEP_S="0.02")
    assert toy.chat().status == 200
    first = toy.sidecar()
    toy.state()
    with toy.load(threads=4, tokens=4) as replies:
        time.sleep(1.5)
        long_clients = [
            subprocess.Popen(  # separate processes, because they wait long
                [sys.executable, "-c", LONG, str(toy.port), traceparent()[0]], stdout=subprocess.PIPE
            )
            for _ in range(3)
        ]
        time.sleep(0.7)
        os.kill(first, signal.SIGKILL)
        second = wait_until(lambda: [pid for pid in toy.sidecars() if pid != first])
        time.sleep(2)
    long_traces = [process.communicate(timeout=20)[0].decode().strip() for process in long_clients]
    assert toy.stop() == 143
    assert len(second) == 1
    assert all(reply.status == 200 for reply in replies)
    # Requests in flight during the restart have their trace and their steps.
    for span in arrived(receiver, *long_traces):
        assert "error.type" not in span["attributes"]
    steps = Counter(s["trace_id"] for s in receiver.spans if s["name"] == semconv.SPAN_DECODE_STEP)
    assert {steps[trace_id] for trace_id in long_traces} == {79}
    assert_nothing_came_twice(receiver)
    exported = requests_of(receiver)
    missing = [reply for reply in replies if reply.trace_id not in exported]
    # Only finished requests in the memory of the killed sidecar are lost.
    assert len(missing) <= len(replies) // 2
    assert counted(receiver) <= len(replies) + len(long_traces) + 1
    instances = {span["resource"]["service.instance.id"] for span in receiver.spans}
    assert len(instances) == 1


def last_values(receiver: OtlpReceiver, metric: semconv.Metric) -> list[float]:
    """Returns the values of a metric in the last export that has it."""
    exported = [it for it in receiver.metrics if it["name"] == metric.name]
    return [point["value"] for point in exported[-1]["points"]] if exported else []


@LAUNCHERS
@pytest.mark.parametrize(("end", "stopped"), [("stop", 1), ("kill", 0)])
def test_a_stopped_server_says_so(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str], end: str, stopped: int
) -> None:
    toy = start(launcher)
    assert toy.chat().status == 200
    toy.state()
    getattr(toy, end)()
    toy.wait()
    assert receiver.wait_for(lambda it: last_values(it, semconv.SERVER_STOPPED) == [stopped], 5)
    values = {
        value
        for it in receiver.metrics
        if it["name"] == semconv.SERVER_STOPPED.name
        for value in [point["value"] for point in it["points"]]
    }
    assert values <= {0, stopped}


def test_killed_sidecars_are_counted(start: Start, receiver: OtlpReceiver) -> None:
    toy = start(RUN, OTEL_METRIC_EXPORT_INTERVAL="500")
    assert toy.chat().status == 200
    assert receiver.wait_for(lambda it: last_values(it, semconv.SELF_RESTARTS) == [0], 5)
    os.kill(toy.sidecar(), signal.SIGKILL)
    assert toy.chat().status == 200
    assert receiver.wait_for(lambda it: last_values(it, semconv.SELF_RESTARTS) == [1], 15)


def test_the_first_errors_follow_a_zero(start: Start, receiver: OtlpReceiver) -> None:
    """Also where the server ends at once."""
    toy = start(RUN)
    for _ in range(3):
        assert toy.post("/chat", {"fail": "x"}).status == 500
    toy.stop()
    toy.wait()
    counts = [
        point["count"]
        for it in receiver.metrics
        if it["name"] == semconv.REQUEST_DURATION.name
        for point in it["points"]
        if semconv.ERROR_TYPE in point["attributes"]
    ]
    assert counts[0] == 0
    assert counts[-1] == 3


LONG = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=20)
connection.request("POST", "/chat", json.dumps({"tokens": 80}), {"traceparent": f"00-{sys.argv[2]}-00f067aa0ba902b7-01"})
assert connection.getresponse().status == 200
print(sys.argv[2])
"""


def test_crashing_sidecar_restarts_with_backoff_and_is_reported(start: Start) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-failures-") as rings:
        Path(rings, "sidecar.lock").mkdir()  # a folder cannot be locked
        toy = start(OTEL_INFER_RINGS=rings)
        pids: set[int] = set()
        began = time.monotonic()
        while toy.read_log().count("the sidecar crashed") < 2:
            assert toy.chat().status == 200
            pids |= set(toy.sidecars())
            assert time.monotonic() - began < 30
        assert len(pids) <= 3
        assert time.monotonic() - began > 3  # the second start after 1 s, the third after another 2 s
        toy.kill()
        toy.wait()


def test_port_is_free_immediately_after_kill_9(start: Start) -> None:
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


def test_suspended_sidecar_does_not_stop_the_server(start: Start, receiver: OtlpReceiver) -> None:
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
    assert toy.post("/flush", {"timeout": 0.2}).body["flushed"] is False
    assert time.monotonic() - began < 5
    assert toy.sidecars() == [sidecar]
    os.kill(sidecar, signal.SIGCONT)
    assert all(reply.status == 200 for reply in during)
    assert max(reply.seconds for reply in during) < 1
    arrived(receiver, *answered_traces([*before, *during]))
    toy.stop()
    assert_nothing_came_twice(receiver)


# ── containers ───────────────────────────────────────────────────────────────────────────────────────────────────

needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="cannot create mount and pid namespaces (needs root or CAP_SYS_ADMIN)",
)


def in_a_mount_namespace(prepare: str) -> tuple[str, ...]:
    """Returns a launcher that runs `prepare` in a new mount namespace, then the command."""
    return ("unshare", "--mount", "sh", "-ec", f'{prepare}\nexec "$@"', "sh")


@needs_mounts
def test_next_start_exports_requests_of_a_killed_container(
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
    toy.folder = None  # it was removed with its namespace
    toy.stop()
    assert_nothing_came_twice(receiver)


def _is_init(pid: int) -> bool:
    """Returns whether a process is the first of a pid namespace below ours."""
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
    arrived(receiver, reply.trace_id, *answered_traces(replies))
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
def test_without_shared_memory_the_server_exports_in_process(
    start: Start, receiver: OtlpReceiver, prepare: str, launcher: Sequence[str]
) -> None:
    toy = start((*in_a_mount_namespace(WITHOUT_MEMORY[prepare]), *launcher))
    replies = [toy.chat() for _ in range(5)]
    assert toy.state()["arena"] == "MemoryArena"
    arrived(receiver, *answered_traces(replies))
    assert toy.read_log().count("in-process, because ") == 1
    assert "/dev/shm" in toy.read_log() or "shared memory" in toy.read_log()
    toy.stop()
    assert "Traceback" not in toy.read_log()
    assert len(toy.read_log().splitlines()) <= 2


def open_to_nobody() -> tuple[str, ...]:
    """Returns a launcher that makes our interpreter reachable for every user, even inside a private home."""
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
def nobody_launcher() -> tuple[str, ...]:
    """Returns the launcher of `open_to_nobody`, or skips if it does not work here."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    launcher = open_to_nobody()
    tried = [*launcher, *AS_NOBODY, "sh", "-c", f'"{sys.executable}" -c "import otel_infer"']
    if subprocess.run(tried, capture_output=True, cwd="/").returncode != 0:
        pytest.skip(f"user {NOBODY} cannot run {sys.executable}")
    return launcher


@needs_mounts
def test_another_user_has_a_separate_folder(
    start: Start, receiver: OtlpReceiver, nobody_launcher: tuple[str, ...]
) -> None:
    toy = start((*nobody_launcher, *AS_NOBODY))
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
def test_child_that_drops_privileges_is_recorded(
    start: Start, receiver: OtlpReceiver, nobody_launcher: tuple[str, ...], launcher: Sequence[str]
) -> None:
    toy = start((*nobody_launcher, *launcher))
    reply = toy.post("/chat", {"fork": {"requests": 2, "uid": NOBODY}})
    assert receiver.wait_for(lambda it: len(requests_of(it).get(reply.trace_id, ())) == 3, 25)
    toy.stop()
    assert_nothing_came_twice(receiver)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


@LAUNCHERS
@pytest.mark.parametrize("mode", ["sidecar", "in-process"])
def test_fork_under_load_is_a_separate_process(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str], mode: str
) -> None:
    toy = start(launcher, OTEL_INFER_MODE=mode)
    assert toy.chat().status == 200
    folder = toy.state()["folder"]
    with toy.load() as replies:
        forks = [toy.post("/chat", {"fork": {"requests": 3}}) for _ in range(3)]
        assert [200, 200, 200] == [reply.status for reply in forks]
        time.sleep(0.5)
        if mode == "sidecar":
            assert len(toy.sidecars()) == 1
    spans = arrived(receiver, *answered_traces(replies))
    for reply in forks:
        # The parent's request, and below it the child's requests, which began in its inherited context.
        assert receiver.wait_for(
            lambda it, reply=reply: len(requests_of(it).get(reply.trace_id, ())) == 4, 25
        )
        requests = requests_of(receiver)[reply.trace_id]
        (parent,) = [span for span in requests if span["attributes"].get("process_role") == "parent"]
        children = [span for span in requests if span is not parent]
        assert {span["parent_span_id"] for span in children} == {parent["span_id"]}
        assert {span["attributes"].get("process_role") for span in children} == {"child"}
        spans += requests
    assert {span["attributes"].get("error.type") for span in spans} == {None}
    assert not any(span["attributes"].get(semconv.TELEMETRY_LOST) for span in spans)
    assert toy.state()["folder"] == folder
    toy.stop()
    assert_nothing_came_twice(receiver)


@LAUNCHERS
def test_spawned_process_uses_the_same_sidecar(
    start: Start, receiver: OtlpReceiver, launcher: Sequence[str]
) -> None:
    toy = start(launcher)
    reply = toy.chat()
    sidecar = toy.sidecar()
    toy.state()
    trace_id, _, headers = traceparent()
    spawned = toy.post("/spawn", {"headers": headers})
    assert spawned.body["status"] == 0
    assert wait_until(lambda: toy.sidecars() == [sidecar])  # one that finds the lock taken exits by itself
    (served, spawned_request) = arrived(receiver, reply.trace_id, trace_id)
    assert served["resource"]["service.instance.id"] == spawned_request["resource"]["service.instance.id"]
    toy.stop()


def test_servers_on_one_host_share_nothing(start: Start, receiver: OtlpReceiver) -> None:
    first, second = start(), start()
    spans = arrived(receiver, first.chat().trace_id, second.chat().trace_id)
    assert first.state()["folder"] != second.state()["folder"]
    assert len({span["resource"]["service.instance.id"] for span in spans}) == 2
    assert {first.sidecar()} != {second.sidecar()}
    first.kill()
    first.wait()
    assert second.chat().status == 200
    assert second.folder is not None
    assert second.folder.exists()
    second.stop()


def test_opentelemetry_instrument_starts_one_uninstrumented_sidecar(
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


def test_removed_ring_folder_costs_no_request(start: Start, receiver: OtlpReceiver) -> None:
    toy = start()
    first = toy.chat()
    sidecar = toy.sidecar()
    folder = Path(toy.state()["folder"])
    arrived(receiver, first.trace_id)
    with toy.load() as replies:
        shutil.rmtree(folder)
        time.sleep(1.5)
    # The sidecar has the files open, so nothing is lost while it runs.
    arrived(receiver, *answered_traces(replies))
    with toy.load() as more:
        os.kill(sidecar, signal.SIGKILL)
        wait_until(lambda: toy.sidecars() not in ([], [sidecar]), 20)
        time.sleep(0.5)
    after = [toy.chat() for _ in range(3)]
    assert all(reply.status == 200 for reply in [*replies, *more, *after])
    arrived(receiver, *answered_traces(after))
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
def test_failing_collector_costs_no_request_and_counts_losses(
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
        for _ in range(3):  # other load on the machine may also delay the server, but not each time
            with toy.load(tokens=2) as batch:
                time.sleep(1.5)
            more += batch
            waits.append(max(reply.seconds for reply in batch))
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


def test_flush_to_stuck_collector_does_not_stop_reading(start: Start, receiver: OtlpReceiver) -> None:
    receiver.answer(slow(2.5))
    toy = start(TOY_STEP_S="0.001")
    toy.chat()
    toy.state()
    with toy.load(threads=8, tokens=50) as replies:
        time.sleep(0.7)
        began = time.monotonic()
        assert toy.post("/flush", {"timeout": 1.5}).body["flushed"] is False
        assert 1.5 <= time.monotonic() - began < 3.0
    receiver.answer(ok())
    spans = arrived(receiver, *answered_traces(replies))
    assert not any(span["attributes"].get(semconv.TELEMETRY_LOST) for span in spans)
    toy.stop()


def test_recovered_collector_receives_later_requests(start: Start, receiver: OtlpReceiver) -> None:
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
def test_real_server_survives_sidecar_crash_and_reports_death(
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
        wait_until(lambda: _children(supervisor, b"otel_infer-sidecar"))
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
    killed = [s for spans in requests_of(receiver).values() for s in spans if "error.type" in s["attributes"]]
    assert len(killed) == 4
    assert {span["attributes"]["error.type"] for span in killed} == {"process_died"}
    assert_nothing_came_twice(receiver)


def _children(parent: int, name: bytes = b"") -> list[int]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _cut_off(port: int, model: Path) -> None:
    """Sends a request whose server is killed."""
    try:
        chat(port, model, tokens=400)
    except Exception:
        pass
