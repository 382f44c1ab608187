"""A process lists the threads that Python has started, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from otel_infer.instrumentation.threading import instrumentor
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.python_threads import PythonThreads, read_python_threads
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import Recorder, recorder
from tests.support.rings import Recording

PID = 4711


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def start_thread(release: threading.Event) -> int:
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    assert thread.native_id
    return thread.native_id


def test_threads_that_run_when_the_ring_is_made_are_listed(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_thread(release)
    own, arena = Recorder(), MemoryArena()
    own.start(lambda: arena, lambda: None, lambda reason: None)
    assert own.ensure_rings() and own.requests is not None
    rings = ProcessRings(3, RequestReader(own.requests.memory, 3), -1, None)
    assert rings.list_python_threads() == []  # the process is not visible
    monkeypatch.setattr(rings, "find_pid", lambda: PID)
    assert {(PID, started), (PID, threading.get_native_id())} <= set(rings.list_python_threads())


def test_thread_that_starts_later_is_listed(release: threading.Event) -> None:
    instrumentor.install()
    recording = Recording()
    try:
        assert recorder.ensure_rings() and recorder.requests is not None
        started = start_thread(release)
        assert started in read_python_threads(recorder.requests.memory)
    finally:
        recording.stop()
        instrumentor.remove()


def test_long_lived_thread_stays_listed_while_others_come_and_go(release: threading.Event) -> None:
    memory = bytearray(layout.PAGE)
    started = start_thread(release)
    threads = PythonThreads(memory)
    for number in range(5 * layout.PYTHON_THREADS):
        threads.add(1_000_000 + number)
    assert started in read_python_threads(memory)
    assert len(read_python_threads(memory)) <= layout.PYTHON_THREADS


def test_table_leaves_the_rest_of_the_header_alone() -> None:
    memory = bytearray(b"\xff" * layout.PAGE)
    PythonThreads(memory)
    assert memory[: layout.PYTHON_THREADS_AT] == b"\xff" * layout.PYTHON_THREADS_AT
    assert memory[layout.THREADS_AT :] == b"\xff" * (layout.PAGE - layout.THREADS_AT)
