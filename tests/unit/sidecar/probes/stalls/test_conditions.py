"""A loop, a step and a request are late by their own limits, as the shared memory shows them."""

from __future__ import annotations

import threading

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.live_threads import note_thread
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import Recorder
from otel_infer.ringbuffer.step_reader import StepReader
from otel_infer.sidecar.probes.stalls.conditions import ProcessConditions, Stall, sleep_until_late
from otel_infer.sidecar.probes.stalls.hang import HUNG_NS, Hang, find_hang

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is missing")
MS = 1_000_000
SECOND = 1000 * MS


class Process:
    """A recorder, and what a sidecar sees of it."""

    def __init__(self) -> None:
        self.arena, self.recorder = MemoryArena(), Recorder()
        self.recorder.start(lambda: self.arena, lambda: None, lambda reason: None)
        assert self.recorder.ensure_rings()
        assert self.recorder.requests is not None
        self.writer = self.recorder.requests
        self.rings = ProcessRings(1, RequestReader(self.writer.memory, 1), -1, None)
        self.conditions = ProcessConditions(self.rings)
        self.began = _clock.now()

    def open_request(self, at: int = 0) -> int:
        arrived = events.RequestArrived(
            self.began + at, 1, bytes(16), bytes(8), bytes(8), bytes(8), 0, "chat", "", "", "POST"
        )
        return self.writer.open_request(arrived)

    def start_engine(self) -> None:
        self.batch = self.recorder.acquire_batch_writer("toy")
        assert self.batch is not None
        self.rings.engines.append(StepReader(memoryview(self.batch.ring.memory), 2))
        self.conditions.add_engines()

    def run_step(self, at: int, takes: int = 0) -> None:
        assert self.batch is not None
        members = [object()]
        self.batch.handles[members[0]] = (1).to_bytes(4, "little")
        step = self.batch.ring.write_unchanged(0, 0, 0, 0, 0, self.began + at)
        if not step:
            self.batch.ring.step += 1
            raise AssertionError("a keyframe is due")
        if takes:
            self.batch.ring.write_single_tokens(step, self.began + at + takes)

    def find(self, at: int) -> list[Stall]:
        return self.conditions.find_stalls(self.began + at)


@pytest.fixture
def process() -> Process:
    return Process()


def test_nothing_is_late_in_an_idle_process(process: Process) -> None:
    assert process.find(0) == process.find(3600 * SECOND) == []


def test_a_loop_is_late_after_its_check_was_due(process: Process) -> None:
    word = layout.W_LOOPS + 2
    process.writer.words[word], process.writer.words[word + 1] = process.began + 50 * MS, 77
    assert process.find(70 * MS) == []
    assert process.find(80 * MS) == [Stall(events.PAUSE_EVENT_LOOP, process.began + 50 * MS, 77)]
    process.writer.words[word] = 0  # no request is in flight
    assert process.find(90 * MS) == []


def test_a_request_is_late_while_its_thread_works(process: Process) -> None:
    handle = process.open_request()
    entry = note_thread(process.writer.threads, handle, process.began)
    assert process.find(200 * MS) == []
    (stall,) = process.find(260 * MS)
    assert stall == Stall(events.STALLED_REQUEST, process.began, threading.get_native_id(), handle)
    process.writer.threads[entry] = 0
    assert process.find(300 * MS) == []


def test_a_request_in_an_engine_is_not_late_until_it_left_it(process: Process) -> None:
    handle = process.open_request()
    note_thread(process.writer.threads, handle, process.began)
    process.writer.write_event(handle, events.RequestSubmitted(process.began, 5, 5, 1, "toy"))
    assert process.find(5 * SECOND) == []
    process.writer.write_event(handle, events.EngineFinished(process.began, "stop", 5))
    assert process.find(6 * SECOND) == process.find(6 * SECOND + 200 * MS) == []
    assert [stall.since for stall in process.find(6 * SECOND + 300 * MS)] == [process.began + 6 * SECOND]


def test_what_takes_long_every_time_is_not_late_without_an_engine(process: Process) -> None:
    for number in range(20):
        begin = number * SECOND
        handle = process.open_request(begin)
        entry = note_thread(process.writer.threads, handle, process.began + begin)
        for at in (100, 400):
            late = process.find(begin + at * MS)
            assert not late or number < 4, number
        process.writer.threads[entry] = 0
        process.find(begin + 500 * MS)


def run_calls(process: Process, begin_s: int, count: int, takes_ms: int) -> list[bool]:
    """Runs calls in a thread, one a second; returns which of them was late just before it ended."""
    late = []
    for second in range(begin_s, begin_s + count):
        entry = note_thread(
            process.writer.threads, process.open_request(second * SECOND), process.began + second * SECOND
        )
        late.append(bool(process.find(second * SECOND + takes_ms * MS)))
        process.writer.threads[entry] = 0
        process.find(second * SECOND + takes_ms * MS)
    return late


def test_short_stalls_are_late_if_they_recur(process: Process) -> None:
    run_calls(process, 0, 20, 5)
    assert run_calls(process, 100, 1, 40) == [False]
    assert run_calls(process, 200, 5, 60) == [False, False, False, True, True]
    assert run_calls(process, 300, 1, 60) == [False]
    assert run_calls(process, 400, 1, 250) == [True]


def test_four_times_the_usual_time_is_never_late(process: Process) -> None:
    run_calls(process, 0, 20, 200)
    assert run_calls(process, 100, 1, 790) == [False]
    assert run_calls(process, 200, 1, 810) == [True]


def test_a_long_stall_is_reported_again_after_one_two_and_four_seconds(process: Process) -> None:
    note_thread(process.writer.threads, process.open_request(), process.began)
    instants = (250, 1000, 1250, 3200, 3250, 7200, 7250)
    assert [len(process.find(at * MS)) for at in instants] == [1, 0, 1, 0, 1, 0, 1]


def test_the_sleep_ends_when_something_is_late(process: Process) -> None:
    began = _clock.now()
    sleep_until_late([process.conditions], began + 60 * MS, 10 * MS)
    assert _clock.now() - began >= 60 * MS
    word = layout.W_LOOPS
    process.writer.words[word] = due_at = _clock.now() + 50 * MS
    sleep_until_late([process.conditions], due_at + 3600 * SECOND, 10 * MS)
    assert [stall.since for stall in process.conditions.find_stalls(_clock.now())] == [due_at]


def test_without_a_budget_the_sleep_is_not_cut_short(process: Process) -> None:
    process.writer.words[layout.W_LOOPS] = process.began
    until = _clock.now() + 50 * MS
    sleep_until_late([process.conditions], until, 10 * MS, reports_from=until + SECOND)
    assert _clock.now() >= until
    assert process.find(SECOND)  # the delay was not forgotten


def test_a_step_that_does_not_end_is_late(process: Process) -> None:
    process.start_engine()
    assert process.batch is not None
    ring = process.batch.ring
    member = object()
    process.batch.handles[member] = (1).to_bytes(4, "little")
    step = process.batch.write_scheduled([member])
    now = _clock.now()
    (stall,) = process.conditions.find_stalls(now + SECOND)
    assert (stall.reason, stall.thread) == (events.STALLED_STEP, threading.get_native_id())
    ring.write_single_tokens(step, now)
    assert process.conditions.find_stalls(now + 2 * SECOND) == []


def test_a_thread_is_noted_once_per_request(process: Process) -> None:
    words, handle = process.writer.threads, process.open_request()
    first = note_thread(words, handle, 1)
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(note_thread(words, handle, 2)))
    other.start()
    other.join()
    assert first >= 0 and found == [-1]
    assert note_thread(words, 0, 3) == -1


# ── hangs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_hangs_whose_engine_ends_no_step(process: Process) -> None:
    process.start_engine()
    handle = process.open_request()
    process.writer.write_event(handle, events.RequestSubmitted(process.began, 5, 5, 1, "toy"))
    process.find(0)
    assert find_hang([process.conditions], process.began + HUNG_NS - 1) is None
    assert find_hang([process.conditions], process.began + HUNG_NS) == Hang(process.began, 1)
    process.writer.write_event(handle, events.EngineFinished(process.began, "stop", 5))
    process.find(0)
    assert find_hang([process.conditions], process.began + 2 * HUNG_NS) is None


def test_one_long_call_without_an_engine_is_no_hang(process: Process) -> None:
    handles = [process.open_request(), process.open_request()]
    note_thread(process.writer.threads, handles[0], process.began)
    process.find(0)
    assert find_hang([process.conditions], process.began + 2 * HUNG_NS) is None
    note_thread(process.writer.threads, handles[1], process.began)
    process.find(0)
    assert find_hang([process.conditions], process.began + 2 * HUNG_NS) == Hang(process.began, 2)
