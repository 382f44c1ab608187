"""When a tape is written, one at a time, and what is said where there is none."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_infer.export import http_server
from otel_infer.ringbuffer import directory, events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.sidecar.recording import dump_request, file, flight_recorder
from otel_infer.sidecar.recording.flight_recorder import DumpRejected, FlightRecorder
from otel_infer.sidecar.recording.webhook import Webhook

SECOND = 1_000_000_000
START = 1000 * SECOND


class Flight:
    """A recorder with a server that says something at each wake."""

    def __init__(self, folder: Path, on_slo: bool = True) -> None:
        self.rings, self.folder = folder / "rings", folder / "tapes"
        self.rings.mkdir(mode=0o700)
        self.recorder = FlightRecorder(self.rings, str(self.folder), on_slo)
        self.now = START
        self.wakes(1)

    def wakes(self, count: int, apart: int = SECOND // 20) -> None:
        for _ in range(count):
            self.now += apart
            self.recorder.add_events([RecordedEvent(1, 7, events.TokenReached(self.now))], self.now)
            self.recorder.process_dump_requests(self.now)
        self.rest()

    def rest(self) -> None:
        """Until nobody writes."""
        if self.recorder._thread is not None:
            self.recorder._thread.join(10)

    def tapes(self) -> list[Path]:
        return sorted(self.folder.glob("*"))


@pytest.fixture
def flight(tmp_path: Path) -> Flight:
    return Flight(tmp_path)


# ── breaches ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_that_missed_their_objectives_are_no_breach_and_three_are(flight: Flight) -> None:
    for number in range(2):
        flight.recorder.record_slo_miss(flight.now + number)
    flight.wakes(100)
    assert flight.tapes() == []
    flight.recorder.record_slo_miss(flight.now)
    flight.wakes(100)
    assert len(flight.tapes()) == 1


def test_three_in_more_than_ten_seconds_are_no_breach(flight: Flight) -> None:
    for _ in range(5):
        flight.recorder.record_slo_miss(flight.now)
        flight.wakes(102)
    assert flight.tapes() == []


def test_a_breach_is_written_two_seconds_later_with_itself_in_it(flight: Flight) -> None:
    at = flight.now
    for _ in range(3):
        flight.recorder.record_slo_miss(at)
    flight.wakes(39)
    assert flight.tapes() == []
    flight.wakes(2)
    (path,) = flight.tapes()
    said = [fact.event.at for passage in file.read_batches(path) for fact in passage.recorded_events]
    assert at in said
    assert max(said) >= at + 2 * SECOND


def test_there_is_at_most_one_tape_a_minute_and_then_another(flight: Flight) -> None:
    for _ in range(58 * 2):
        flight.recorder.record_slo_miss(flight.now)
        flight.wakes(10)
    assert len(flight.tapes()) == 1
    for _ in range(10):
        flight.recorder.record_slo_miss(flight.now)
        flight.wakes(10)
    flight.wakes(45)
    assert len(flight.tapes()) == 2


def breached(flight: Flight, minutes: int) -> list[float]:
    """A breach that lasts so long; the minutes of it at which tapes were asked for."""
    asked, began, real = [], flight.now, flight.recorder.request_dump

    def ask(reason: str, wait_ns: int = 0) -> Path:
        asked.append((flight.now - began) / 60e9)
        return real(reason, wait_ns)

    flight.recorder.request_dump = ask  # type: ignore[method-assign]
    for _ in range(minutes * 15):
        for _ in range(3):
            flight.recorder.record_slo_miss(flight.now)
        flight.wakes(1, 4 * SECOND)
    flight.recorder.request_dump = real  # type: ignore[method-assign]
    return [round(at) for at in asked]


def test_a_breach_that_lasts_is_written_ever_more_rarely_so_that_its_beginning_stays(flight: Flight) -> None:
    assert breached(flight, 100) == [0, 1, 3, 7, 15, 31, 63, 95]


def test_a_breach_after_some_quiet_minutes_is_another(flight: Flight) -> None:
    assert breached(flight, 20) == [0, 1, 3, 7, 15]
    flight.wakes(70, 4 * SECOND)
    assert breached(flight, 2) == []
    flight.wakes(80, 4 * SECOND)
    assert breached(flight, 4) == [0, 1, 3]


def test_unless_it_was_asked_for_a_breach_writes_nothing(tmp_path: Path) -> None:
    flight = Flight(tmp_path, on_slo=False)
    for _ in range(9):
        flight.recorder.record_slo_miss(flight.now)
    flight.wakes(100)
    assert flight.tapes() == []


def test_the_newest_20_tapes_stay_and_nothing_else_is_removed(flight: Flight) -> None:
    flight.folder.mkdir()
    others = [flight.folder / name for name in ("mine.tape", "otel_infer-20200102-030405.tape")]
    for other in others:  # the second as `otel-infer dump` calls them
        other.touch()
    for _ in range(23):
        flight.recorder.request_dump(flight_recorder.SIGNAL)
        flight.wakes(3)
    assert len(flight.tapes()) == 22
    assert all(other.exists() for other in others)
    assert {path.stat().st_mode & 0o777 for path in flight.tapes() if path not in others} == {0o600}


# ── one at a time ────────────────────────────────────────────────────────────────────────────────────────────────


def test_never_is_more_than_one_written_at_a_time_and_who_asks_again_gets_the_same(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, most, real = [], threading.Event(), [], flight_recorder.write_recording

    def slowly(*arguments: Any) -> None:
        writing.append(arguments)
        most.append(len(writing))
        assert go_on.wait(10)
        real(*arguments)
        writing.pop()

    monkeypatch.setattr(flight_recorder, "write_recording", slowly)
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
    go_on.set()
    flight.rest()
    flight.wakes(3)
    assert first.exists()
    assert other.exists()
    assert max(most) == 1


def test_what_was_said_before_somebody_asked_is_in_the_tape(flight: Flight) -> None:
    """Rings hand out what was complete a wake ago: of now, two wakes later."""
    path = flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(1)
    assert not path.exists()
    flight.wakes(1)
    assert path.exists()


def test_at_the_end_what_is_waiting_is_written(flight: Flight) -> None:
    for _ in range(3):
        flight.recorder.record_slo_miss(flight.now)
    other = flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.close(10)
    assert other.exists()
    assert len(flight.tapes()) == 2


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    flight = Flight(tmp_path)
    flight.folder.touch()
    with pytest.raises(DumpRejected, match="no folder"):
        flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.signalled = True
    flight.wakes(3)


def test_what_breaks_the_recorder_breaks_nothing_else_and_is_said(flight: Flight) -> None:
    flight.recorder.add_events([RecordedEvent(1, 7, events.AttributeSet(5, "key", object()))], 6)  # type: ignore[arg-type]
    with pytest.raises(DumpRejected, match="the flight recorder broke"):
        flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.wakes(5)
    assert flight.recorder.window.size == 0


def test_a_disk_that_is_full_costs_the_tape_and_leaves_nothing(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flight_recorder.RecordingWriter, "write", full)
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(5)
    assert flight.tapes() == []
    monkeypatch.undo()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(5)
    assert len(flight.tapes()) == 1


def test_where_there_are_no_more_threads_there_is_no_tape_and_the_sidecar_goes_on(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(3)
    flight.recorder.request_dump(flight_recorder.WEBHOOK)
    flight.recorder.close(10)
    assert flight.tapes() == []
    monkeypatch.undo()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(3)
    assert len(flight.tapes()) == 1


def test_a_window_that_cannot_be_taken_is_said_to_who_asked(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("no rows")

    monkeypatch.setattr(flight.recorder.window, "take_snapshot", broken)
    asked = flight.rings / f"dump-{'a' * 16}{directory.DUMP_REQUESTED}"
    asked.touch()
    flight.wakes(10)
    assert asked.with_suffix(directory.DUMP_FAILED).read_text() == "ValueError: no rows"


def test_what_killed_sidecars_were_writing_is_removed_and_what_another_writes_just_now_stays(
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
    flight.wakes(3)
    assert not stale.exists()
    assert fresh.exists() and other.exists()


def test_an_old_tape_that_cannot_be_removed_costs_no_other_and_no_new_one(
    flight: Flight, caplog: pytest.LogCaptureFixture
) -> None:
    flight.folder.mkdir()
    for number in range(22):
        (flight.folder / f"otel_infer-20000101T0000{number:02d}.000000Z-slo-1.tape").touch()
    stuck = flight.folder / "otel_infer-19990101T000000.000000Z-slo-1.tape"
    stuck.mkdir()
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(3)
    assert stuck.exists()
    assert len(flight.tapes()) == 21
    assert "no tape" not in caplog.text
    assert f"{stuck} stays" in caplog.text


# ── by files beside the rings ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sidecar(flight: Flight) -> Iterator[threading.Event]:
    """Wakes until it is told to stop; another process holds its lock."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        directory.FileLock(flight.rings / directory.SIDECAR_LOCK).acquire()
        os.write(writer, b"1")
        threading.Event().wait(60)
        os._exit(0)
    os.read(reader, 1)
    over = threading.Event()

    def wake() -> None:
        while not over.wait(0.01):
            flight.now += SECOND // 20
            flight.recorder.process_dump_requests(flight.now)

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    yield over
    over.set()
    thread.join()
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_who_asks_by_a_file_gets_a_tape(flight: Flight, sidecar: threading.Event) -> None:
    path = dump_request.request_dump(flight.rings)
    assert path.parent == flight.rings
    assert file.read_header(path)["by"] == "command"
    assert flight.tapes() == []
    assert {name for name in os.listdir(flight.rings) if directory.is_dump(name)} == {path.name}


def test_who_is_refused_is_told_why(flight: Flight, sidecar: threading.Event) -> None:
    flight.recorder.add_events([RecordedEvent(1, 7, events.AttributeSet(5, "key", object()))], 6)  # type: ignore[arg-type]
    with pytest.raises(dump_request.DumpFailed, match="the flight recorder broke"):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]


def test_who_gets_no_answer_stops_waiting_and_leaves_nothing(
    flight: Flight, sidecar: threading.Event
) -> None:
    sidecar.set()
    with pytest.raises(dump_request.DumpFailed, match=r"did not answer within 0\.2 s"):
        dump_request.request_dump(flight.rings, 0.2)
    assert os.listdir(flight.rings) == [directory.SIDECAR_LOCK]


def test_where_the_sidecar_ended_nobody_waits(flight: Flight) -> None:
    with pytest.raises(dump_request.DumpFailed, match="ended meanwhile"):
        dump_request.request_dump(flight.rings)


def test_a_tape_that_would_fill_the_memory_of_the_servers_rings_is_refused(
    flight: Flight, sidecar: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that touches shared memory of which there is none left is killed."""
    usage = shutil.disk_usage(flight.rings)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40))
    with pytest.raises(dump_request.DumpFailed, match=r"more than 1/4 of what is free in .*rings: SIGUSR2"):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]
    flight.recorder.request_dump(flight_recorder.SIGNAL)
    flight.wakes(5)
    assert len(flight.tapes()) == 1


def test_who_stops_waiting_leaves_no_tape_that_comes_just_then(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        (asked,) = [name for name in os.listdir(flight.rings) if name.endswith(directory.DUMP_REQUESTED)]
        (flight.rings / asked).with_suffix(directory.DUMP_DONE).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "is_held", lambda _: True)
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dump_request.request_dump(flight.rings)
    assert not [name for name in os.listdir(flight.rings) if directory.is_dump(name)]


def test_a_tape_that_nobody_fetched_is_removed_in_time_and_nothing_else(flight: Flight) -> None:
    stale, fresh, other = (
        flight.rings / name for name in (f"dump-{'a' * 16}.tape", f"dump-{'b' * 16}.tape", "dump-mine.tape")
    )
    for path in (stale, fresh, other):
        path.touch()
    for path in (stale, other):
        os.utime(path, (1, 1))
    assert list(dump_request.pending_dumps(flight.rings)) == []
    assert sorted(os.listdir(flight.rings)) == [fresh.name, other.name]
    directory.remove_server_folder(flight.rings)
    assert os.listdir(flight.rings) == [other.name]


# ── by HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def webhook(flight: Flight) -> Iterator[Webhook]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    webhook = Webhook(str(port), flight.recorder)
    yield webhook
    webhook.close()


def asked(
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
def test_a_post_is_answered_with_the_name_of_a_tape(flight: Flight, webhook: Webhook, body: str) -> None:
    status, answer = asked(webhook, body=body)
    assert status == 202
    flight.wakes(3)
    assert [Path(answer["file"])] == flight.tapes()


def test_an_alert_that_is_over_writes_nothing(flight: Flight, webhook: Webhook) -> None:
    assert asked(webhook, body='{"status": "resolved"}')[0] == 200
    flight.wakes(5)
    assert flight.tapes() == []


BAD: dict[str, tuple[int, dict[str, Any]]] = {
    "another path": (404, {"path": "/"}),
    "GET elsewhere": (404, {"method": "GET", "path": "/metrics"}),
    "GET": (405, {"method": "GET"}),
    "HEAD": (405, {"method": "HEAD"}),
    "DELETE": (405, {"method": "DELETE"}),
    "no JSON": (400, {"body": "hello"}),
    "nested too deep": (400, {"body": "[" * 100_000}),
    "a length that is none": (400, {"headers": {"Content-Length": "-1"}}),
    "no length": (411, {"headers": {"Transfer-Encoding": "chunked"}}),
    "too long": (413, {"headers": {"Content-Length": "99999999999"}}),
    "a page in a browser": (403, {"headers": {"Origin": "http://example.com"}}),
}


@pytest.mark.parametrize(("status", "request_"), BAD.values(), ids=BAD)
def test_a_bad_request_is_told_what_is_wrong_and_writes_nothing(
    flight: Flight, webhook: Webhook, status: int, request_: dict[str, Any]
) -> None:
    answered, answer = asked(webhook, **request_)
    assert answered == status
    assert "error" in answer or request_.get("method") == "HEAD"
    flight.wakes(5)
    assert flight.tapes() == []
    assert asked(webhook)[0] == 202


@pytest.mark.parametrize(
    "begun", [b"POST /dump HTTP/1.0\r\nA: ", b"POST /dump HTTP/1.0\r\nContent-Length: 999999\r\n\r\n"]
)
def test_who_asks_ever_so_slowly_keeps_nobody_else_waiting(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_TIMEOUT_S", 0.3)
    over = threading.Event()
    slow = socket.create_connection(("127.0.0.1", webhook.port))
    slow.sendall(begun)

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                slow.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert asked(webhook)[0] == 202
    finally:
        over.set()
        thread.join()
        slow.close()


def test_where_no_tape_can_be_written_the_alert_is_told_to_come_again(
    flight: Flight, webhook: Webhook
) -> None:
    flight.folder.touch()
    status, answer = asked(webhook)
    assert status == 503
    assert "no folder" in answer["error"]


def test_it_is_for_this_machine_unless_an_address_is_given(flight: Flight, webhook: Webhook) -> None:
    assert webhook._server.server_address[0] == "127.0.0.1"
    webhook.close()
    other = Webhook(f"0.0.0.0:{webhook.port}", flight.recorder)
    assert other._server.server_address[0] == "0.0.0.0"
    other.close()


def test_an_answer_that_is_a_link_is_nobodys_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write there would have us read what only we may."""
    monkeypatch.setattr(directory, "is_held", lambda path: True)
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    folder = tmp_path / "rings"
    folder.mkdir()

    def answer() -> None:
        while not (found := list(folder.glob(f"*{directory.DUMP_REQUESTED}"))):
            time.sleep(0.001)
        found[0].with_suffix(directory.DUMP_DONE).symlink_to(secret)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(dump_request.DumpFailed, match="is a link"):
        dump_request.request_dump(folder, 5.0)
    thread.join()
