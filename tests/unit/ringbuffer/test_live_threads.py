"""The reader lists the threads that worked for a request, also after they are done with it."""

from __future__ import annotations

import threading

import pytest

from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.live_threads import note_thread
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import Recorder

PID = 4711


def test_threads_of_requests_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, arena = Recorder(), MemoryArena()
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    assert recorder.ensure_rings() and recorder.requests is not None
    words = recorder.requests.threads
    rings = ProcessRings(3, RequestReader(recorder.requests.memory, 3), -1, None)
    monkeypatch.setattr(rings, "find_pid", lambda: PID)
    assert rings.list_request_threads() == []

    found: list[int] = []

    def work(handle: int) -> None:
        found.append(threading.get_native_id())
        words[note_thread(words, handle, at=1)] = 0  # it is done

    for handle in (1, 2):
        worker = threading.Thread(target=work, args=(handle,))
        worker.start()
        worker.join()
    own_pid = rings.reader.header.pid
    assert sorted(rings.list_request_threads()) == sorted((3, PID, own_pid, thread) for thread in set(found))
