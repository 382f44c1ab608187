"""The flight recorder: when it writes tapes, one at a time, and how it reports failures."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_infer.export import http_server
from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.sidecar.recording import alert_target, dump_request, file, flight_recorder
from otel_infer.sidecar.recording.flight_recorder import DumpRejected, FlightRecorder
from otel_infer.sidecar.recording.webhook import Webhook

SECOND = 1_000_000_000
START = 1000 * SECOND


class Flight:
    """A flight recorder that receives one event per cycle."""

    def __init__(self, folder: Path, on_slo: bool = True) -> None:
        self.rings, self.folder = folder / "rings", folder / "tapes"
        self.rings.mkdir(mode=0o700)
        self.recorder = FlightRecorder(self.rings, str(self.folder), on_slo)
        self.now = START
        self.run_cycles(1)

    def run_cycles(self, count: int, interval_ns: int = SECOND // 20) -> None:
        for _ in range(count):
            self.now += interval_ns
            self.recorder.add_events([RecordedEvent(1, 7, events.TokenReached(self.now))], self.now)
            self.recorder.process_dump_requests(self.now)
        self.wait_for_writer()

    def wait_for_writer(self) -> None:
        """Waits until the writing thread has ended."""
        if self.recorder._thread is not None:
            self.recorder._thread.join(10)

    def tapes(self) -> list[Path]:
        return sorted(self.folder.glob("*"))


@pytest.fixture
def flight(tmp_path: Path) -> Flight:
    return Flight(tmp_path)


# ── breaches ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_three_missed_objectives_are_a_breach(flight: Flight) -> None:
    """Two are not."""
    for number in range(2):
        flight.recorder.record_slo_miss(flight.now + number)
    flight.run_cycles(100)
    assert flight.tapes() == []
    flight.recorder.record_slo_miss(flight.now)
    flight.run_cycles(100)
    assert len(flight.tapes()) == 1


def test_misses_further_apart_are_no_breach(flight: Flight) -> None:
    """Three misses within 10 s are a breach."""
    for _ in range(5):
        flight.recorder.record_slo_miss(flight.now)
        flight.run_cycles(102)
    assert flight.tapes() == []


def test_a_breach_is_written_two_seconds_later(flight: Flight) -> None:
    at = flight.now
    for _ in range(3):
        flight.recorder.record_slo_miss(at)
    flight.run_cycles(39)
    assert flight.tapes() == []
    flight.run_cycles(2)
    (path,) = flight.tapes()
    times = [recorded.event.at for batch in file.read_batches(path) for recorded in batch.recorded_events]
    assert at in times
    assert max(times) >= at + 2 * SECOND


def test_at_most_one_tape_per_minute_is_written(flight: Flight) -> None:
    for _ in range(58 * 2):
        flight.recorder.record_slo_miss(flight.now)
        flight.run_cycles(10)
    assert len(flight.tapes()) == 1
    for _ in range(10):
        flight.recorder.record_slo_miss(flight.now)
        flight.run_cycles(10)
    flight.run_cycles(45)
    assert len(flight.tapes()) == 2


def run_breach(flight: Flight, minutes: int) -> list[float]:
    """Simulates a breach of this length; returns the minutes at which tapes were requested."""
    requested, began, original = [], flight.now, flight.recorder.request_dump

    def request_dump(reason: str, wait_ns: int = 0) -> Path:
        requested.append((flight.now - began) / 60e9)
        return original(reason, wait_ns)

    flight.recorder.request_dump = request_dump  # type: ignore[method-assign]
    for _ in range(minutes * 15):
        for _ in range(3):
            flight.recorder.record_slo_miss(flight.now)
        flight.run_cycles(1, 4 * SECOND)
    flight.recorder.request_dump = original  # type: ignore[method-assign]
    return [round(at) for at in requested]


def test_tapes_of_a_lasting_breach_become_rarer(flight: Flight) -> None:
    """So that the tape of its beginning is not removed."""
    assert run_breach(flight, 100) == [0, 1, 3, 7, 15, 31, 63, 95]


def test_a_breach_after_quiet_minutes_is_new(flight: Flight) -> None:
    assert run_breach(flight, 20) == [0, 1, 3, 7, 15]
    flight.run_cycles(70, 4 * SECOND)
    assert run_breach(flight, 2) == []
    flight.run_cycles(80, 4 * SECOND)
    assert run_breach(flight, 4) == [0, 1, 3]


def test_a_breach_writes_nothing_unless_configured(tmp_path: Path) -> None:
    flight = Flight(tmp_path, on_slo=False)
    for _ in range(9):
        flight.recorder.record_slo_miss(flight.now)
    flight.run_cycles(100)
    assert flight.tapes() == []


def test_only_tapes_beyond_the_newest_20_are_removed(flight: Flight) -> None:
    flight.folder.mkdir()
    others = [flight.folder / name for name in ("mine.tape", "otel_infer-20200102-030405.tape")]
    for other in others:  # `otel-infer dump` uses the second name
        other.touch()
    for _ in range(23):
        flight.recorder.request_dump(flight_recorder.SIGNAL)
        flight.run_cycles(3)
    assert len(flight.tapes()) == 22
    assert all(other.exists() for other in others)
    assert {path.stat().st_mode & 0o777 for path in flight.tapes() if path not in others} == {0o600}


def test_requested_tapes_do_not_push_out_those_of_breaches(flight: Flight) -> None:
    flight.folder.mkdir()
    breaches = [flight.folder / f"otel_infer-20000101T0000{n:02d}.000000Z-slo-1.tape" for n in range(20)]
    for path in breaches:
        path.touch()
    for _ in range(22):
        flight.recorder.request_dump(flight_recorder.WEBHOOK)
        flight.run_cycles(3)
    assert all(path.exists() for path in breaches)
    assert len(flight.tapes()) == 40


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: run as root")
def test_planted_tapes_do_not_push_out_real_ones(flight: Flight) -> None:
    flight.folder.mkdir()
    real = flight.folder / "otel_infer-20000101T000000.000000Z-signal-1.tape"
    real.touch()
    for number in range(25):
        planted = flight.folder / f"otel_infer-29990101T0000{number:02d}.000000Z-signal-1.tape"
        planted.touch()
        os.chown(planted, 65534, 65534)
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(3)
    assert real.exists()


# ── one at a time ────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_tape_is_written_at_a_time(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request for the same reason gets the path of the pending tape."""
    writing, proceed, counts, original = [], threading.Event(), [], flight_recorder.write_recording

    def write_slowly(*arguments: Any) -> None:
        writing.append(arguments)
        counts.append(len(writing))
        assert proceed.wait(10)
        original(*arguments)
        writing.pop()

    monkeypatch.setattr(flight_recorder, "write_recording", write_slowly)
    first = flight.recorder.request_dump(flight_recorder.WEBHOOK)
    assert flight.recorder.request_dump(flight_recorder.WEBHOOK) == first
    for _ in range(4):
        flight.now += SECOND
        flight.recorder.process_dump_requests(flight.now)
    assert flight.recorder.request_dump(flight_recorder.WEBHOOK) == first
    other = flight.recorder.request_dump(flight_recorder.SIGNAL)
    for _ in range(4):
        flight.now += SECOND
        flight.recorder.process_dump_requests(flight.now)
    assert not first.exists()
    proceed.set()
    flight.wait_for_writer()
    flight.run_cycles(3)
    assert first.exists()
    assert other.exists()
    assert max(counts) == 1


def test_a_tape_contains_events_before_its_request(flight: Flight) -> None:
    """A ring reader returns an event one cycle after it is complete, so the tape waits two cycles."""
    path = flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(1)
    assert not path.exists()
    flight.run_cycles(1)
    assert path.exists()


def test_close_writes_pending_tapes(flight: Flight) -> None:
    for _ in range(3):
        flight.recorder.record_slo_miss(flight.now)
    other = flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.close(10)
    assert other.exists()
    assert len(flight.tapes()) == 2


def test_a_dump_without_a_usable_folder_is_rejected(tmp_path: Path) -> None:
    flight = Flight(tmp_path)
    flight.folder.touch()
    with pytest.raises(DumpRejected, match="folder"):
        flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.signalled = True
    flight.run_cycles(3)


def test_a_failed_recorder_rejects_dumps(flight: Flight) -> None:
    flight.recorder.add_events([RecordedEvent(1, 7, events.AttributeSet(5, "key", object()))], 6)  # type: ignore[arg-type]
    with pytest.raises(DumpRejected, match="flight recorder failed"):
        flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.run_cycles(5)
    assert flight.recorder.window.size == 0


def test_a_full_disk_leaves_no_partial_tape(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flight_recorder.RecordingWriter, "write", fail_write)
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(5)
    assert flight.tapes() == []
    monkeypatch.undo()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(5)
    assert len(flight.tapes()) == 1


def test_without_threads_no_tape_is_written(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_start)
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(3)
    flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.close(10)
    assert flight.tapes() == []
    monkeypatch.undo()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(3)
    assert len(flight.tapes()) == 1


def test_a_failed_snapshot_is_reported_to_the_requester(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_snapshot() -> None:
        raise ValueError("no rows")

    monkeypatch.setattr(flight.recorder.window, "take_snapshot", fail_snapshot)
    request = flight.rings / f"dump-{'a' * 16}{directory.DUMP_REQUESTED}"
    request.touch()
    flight.run_cycles(10)
    assert request.with_suffix(directory.DUMP_REJECTED).read_text() == "ValueError: no rows"


def test_only_stale_partial_tapes_are_removed(
    flight: Flight,
) -> None:
    flight.folder.mkdir()
    stale, fresh, other = (
        flight.folder / name for name in ("otel_infer-1-slo-9.part", "otel_infer-2-slo-9.part", "mine.part")
    )
    for path in (stale, fresh, other):
        path.touch()
    for path in (stale, other):
        os.utime(path, (1, 1))
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(3)
    assert not stale.exists()
    assert fresh.exists() and other.exists()


def test_an_unremovable_old_tape_prevents_nothing_else(
    flight: Flight, caplog: pytest.LogCaptureFixture
) -> None:
    flight.folder.mkdir()
    for number in range(22):
        (flight.folder / f"otel_infer-20000101T0000{number:02d}.000000Z-slo-1.tape").touch()
    stuck = flight.folder / "otel_infer-19990101T000000.000000Z-slo-1.tape"
    stuck.mkdir()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(3)
    assert stuck.exists()
    assert len(flight.tapes()) == 22  # 20 of breaches, the requested one, and the one that stays
    assert "no tape" not in caplog.text
    assert str(stuck) in caplog.text


# ── dump requests by file ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stop_sidecar(flight: Flight) -> Iterator[Callable[[], None]]:
    """Runs cycles in a thread until it is called; another process holds the sidecar's lock.

    A recorder has one thread: a test that runs cycles itself stops this one first.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        directory.FileLock(flight.rings / directory.SIDECAR_LOCK).acquire()
        os.write(writer, b"1")
        threading.Event().wait(60)
        os._exit(0)
    os.read(reader, 1)
    over = threading.Event()

    def run_cycles() -> None:
        while not over.wait(0.01):
            flight.now += SECOND // 20
            flight.recorder.process_dump_requests(flight.now)

    thread = threading.Thread(target=run_cycles, daemon=True)

    def stop() -> None:
        over.set()
        thread.join()

    thread.start()
    yield stop
    stop()
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_dump_request_by_file_returns_a_tape(flight: Flight, stop_sidecar: Callable[[], None]) -> None:
    path = dump_request.request_dump(flight.rings)
    assert path.parent == flight.rings
    assert file.read_header(path)["by"] == "command"
    assert flight.tapes() == []
    assert {name for name in os.listdir(flight.rings) if directory.is_dump(name)} == {path.name}


def test_a_rejected_dump_request_raises_the_reason(flight: Flight, stop_sidecar: Callable[[], None]) -> None:
    flight.recorder.add_events([RecordedEvent(1, 7, events.AttributeSet(5, "key", object()))], 6)  # type: ignore[arg-type]
    with pytest.raises(dump_request.DumpFailed, match="flight recorder failed"):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]


def test_an_unanswered_dump_request_leaves_no_file(flight: Flight, stop_sidecar: Callable[[], None]) -> None:
    stop_sidecar()
    with pytest.raises(dump_request.DumpFailed, match=r"0\.2 s"):
        dump_request.request_dump(flight.rings, 0.2)
    assert os.listdir(flight.rings) == [directory.SIDECAR_LOCK]


def test_a_dump_request_without_sidecar_fails_at_once(flight: Flight) -> None:
    with pytest.raises(dump_request.DumpFailed, match="ended before"):
        dump_request.request_dump(flight.rings)


def test_a_tape_exceeding_free_shared_memory_is_rejected(
    flight: Flight, stop_sidecar: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills a server that touches shared memory when none is left."""
    usage = shutil.disk_usage(flight.rings)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40))
    with pytest.raises(dump_request.DumpFailed, match=r"^the tape would take more than 1/4 .*rings: SIGUSR2"):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]
    stop_sidecar()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.run_cycles(5)
    assert len(flight.tapes()) == 1


def test_an_interrupted_dump_request_removes_its_tape(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        (request,) = [name for name in os.listdir(flight.rings) if name.endswith(directory.DUMP_REQUESTED)]
        (flight.rings / request).with_suffix(directory.DUMP_DONE).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "is_held", lambda _, **__: True)
    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]


def test_only_stale_unfetched_tapes_are_removed(flight: Flight) -> None:
    stale, fresh, other = (
        flight.rings / name for name in (f"dump-{'a' * 16}.tape", f"dump-{'b' * 16}.tape", "dump-mine.tape")
    )
    for path in (stale, fresh, other):
        path.touch()
    for path in (stale, other):
        os.utime(path, (1, 1))
    assert list(dump_request.take_dump_requests(flight.rings)) == []
    assert sorted(os.listdir(flight.rings)) == [fresh.name, other.name]
    directory.remove_server_folder(flight.rings)
    assert os.listdir(flight.rings) == [other.name]


# ── webhook ──────────────────────────────────────────────────────────────────────────────────────────────────────


RESOURCE = {"service.name": "chat", "service.instance.id": "i-1"}


@pytest.fixture
def webhook(flight: Flight) -> Iterator[Webhook]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    webhook = Webhook(str(port), flight.recorder, RESOURCE)
    yield webhook
    webhook.close()


def send_request(
    webhook: Webhook,
    method: str = "POST",
    path: str = "/dump",
    body: str = "",
    headers: Mapping[str, str] = {},
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", webhook.port, timeout=10)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


@pytest.mark.parametrize("body", ["", "{}", '{"status": "firing", "alerts": []}', "[1]"])
def test_a_post_returns_the_path_of_a_tape(flight: Flight, webhook: Webhook, body: str) -> None:
    status, answer = send_request(webhook, body=body)
    assert status == 202
    flight.run_cycles(3)
    assert [Path(answer["file"])] == flight.tapes()


def test_a_resolved_alert_writes_no_tape(flight: Flight, webhook: Webhook) -> None:
    assert send_request(webhook, body='{"status": "resolved"}')[0] == 200
    flight.run_cycles(5)
    assert flight.tapes() == []


def notification(*alerts: Mapping[str, str], status: str = "firing") -> str:
    """Returns the body that Alertmanager sends for a group of alerts with these labels."""
    listed = [{"status": status, "labels": {"alertname": "A", **labels}} for labels in alerts]
    return json.dumps({"version": "4", "status": "firing", "alerts": listed})


OWN, OTHER = {"job": "chat"}, {"job": "search"}
ADDRESSES: dict[str, tuple[str, str, int]] = {
    "own job": ("/dump", notification(OWN), 202),
    "own job and instance": ("/dump", notification({**OWN, "instance": "i-1"}), 202),
    "no server": ("/dump", notification({}), 202),
    "one of two": ("/dump", notification(OTHER, OWN), 202),
    "another job": ("/dump", notification(OTHER), 200),
    "another instance": ("/dump", notification({**OWN, "instance": "i-2"}), 200),
    "resolved": ("/dump", notification(OWN, status="resolved"), 200),
    "scraped as": ("/dump?job=scraped", notification({"job": "scraped"}), 202),
    "scraped as another": ("/dump?job=scraped", notification(OWN), 200),
    "scraped at": ("/dump?job=s&instance=h:1", notification({"job": "s", "instance": "h:1"}), 202),
    "scraped at another": ("/dump?job=s&instance=h:1", notification({"job": "s", "instance": "h:2"}), 200),
}


@pytest.mark.parametrize(("path", "body", "status"), ADDRESSES.values(), ids=ADDRESSES)
def test_only_a_page_about_this_server_writes_a_tape(
    flight: Flight, webhook: Webhook, path: str, body: str, status: int
) -> None:
    answered, answer = send_request(webhook, path=path, body=body)
    flight.run_cycles(3)
    assert (answered, len(flight.tapes())) == (status, int(status == 202))
    assert (answer["file"] is None) == (status == 200)


@pytest.mark.parametrize("body", ['{"alerts": [1]}', '{"alerts": [{"labels": 1}]}', '{"alerts": {}}'])
def test_an_odd_notification_is_answered(webhook: Webhook, body: str) -> None:
    assert send_request(webhook, body=body)[0] in (200, 202)


def test_a_namespace_is_part_of_the_job() -> None:
    own = alert_target.find_own_labels({**RESOURCE, "service.namespace": "prod"})
    assert own == {"job": "prod/chat", "instance": "i-1"}


BAD: dict[str, tuple[int, dict[str, Any]]] = {
    "unknown path": (404, {"path": "/"}),
    "GET on an unknown path": (404, {"method": "GET", "path": "/metrics"}),
    "GET": (405, {"method": "GET"}),
    "HEAD": (405, {"method": "HEAD"}),
    "DELETE": (405, {"method": "DELETE"}),
    "no JSON": (400, {"body": "hello"}),
    "deeply nested": (400, {"body": "[" * 100_000}),
    "invalid length": (400, {"headers": {"Content-Length": "-1"}}),
    "no length": (411, {"headers": {"Transfer-Encoding": "chunked"}}),
    "too long": (413, {"headers": {"Content-Length": "99999999999"}}),
    "browser page": (403, {"headers": {"Origin": "http://example.com"}}),
}


@pytest.mark.parametrize(("status", "request_"), BAD.values(), ids=BAD)
def test_a_bad_request_returns_an_error(
    flight: Flight, webhook: Webhook, status: int, request_: dict[str, Any]
) -> None:
    """It writes no tape, and the next request is served."""
    answered, answer = send_request(webhook, **request_)
    assert answered == status
    assert "error" in answer or request_.get("method") == "HEAD"
    flight.run_cycles(5)
    assert flight.tapes() == []
    assert send_request(webhook)[0] == 202


@pytest.mark.parametrize(
    "beginning", [b"POST /dump HTTP/1.0\r\nA: ", b"POST /dump HTTP/1.0\r\nContent-Length: 999999\r\n\r\n"]
)
def test_a_slow_client_does_not_block_other_clients(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_TIMEOUT_S", 0.3)
    over = threading.Event()
    slow = socket.create_connection(("127.0.0.1", webhook.port))
    slow.sendall(beginning)

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                slow.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert send_request(webhook)[0] == 202
    finally:
        over.set()
        thread.join()
        slow.close()


def test_a_rejected_dump_returns_503(flight: Flight, webhook: Webhook) -> None:
    flight.folder.touch()
    status, answer = send_request(webhook)
    assert status == 503
    assert "folder" in answer["error"]


def test_the_webhook_listens_on_loopback_by_default(flight: Flight, webhook: Webhook) -> None:
    assert webhook._server.server_address[0] == "127.0.0.1"
    webhook.close()
    other = Webhook(f"0.0.0.0:{webhook.port}", flight.recorder, {})
    assert other._server.server_address[0] == "0.0.0.0"
    other.close()


def test_a_link_as_answer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another user could make the command read a file that only its user may read."""
    monkeypatch.setattr(directory, "is_held", lambda path, **__: True)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "rings"
    folder.mkdir()

    def answer() -> None:
        while not (found := list(folder.glob(f"*{directory.DUMP_REQUESTED}"))):
            time.sleep(0.001)
        found[0].with_suffix(directory.DUMP_DONE).symlink_to(secret)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(dump_request.DumpFailed, match="not a regular file"):
        dump_request.request_dump(folder, 5.0)
    thread.join()
