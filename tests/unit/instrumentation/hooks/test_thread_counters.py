"""A thread records its kernel counters of each generation at its end."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.hooks import thread_counters
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.support.rings import Recording

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat"
)
RAN_S, SLEPT_S = 0.05, 0.1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    recording, seen = Recording(), []
    monkeypatch.setattr(recorder, "record_process", seen.append)
    yield seen
    recording.stop()


def generate() -> None:
    """Acquires a writer, computes and sleeps for known times, and records the thread's totals."""
    writer = recorder.acquire_batch_writer("toy")
    assert writer is not None
    thread_counters.begin_thread_run()
    until = time.thread_time() + RAN_S
    while time.thread_time() < until:
        hashlib.sha256(bytes(1 << 14))
    time.sleep(SLEPT_S)
    thread_counters.record_thread_run(writer, "toy")
    recorder.release_batch_writer("toy", writer)


def find_runs(recorded: list[Any]) -> list[events.ThreadRan]:
    return [event for event in recorded if isinstance(event, events.ThreadRan)]


def test_thread_records_its_totals(recorded: list[Any]) -> None:
    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    (run,) = find_runs(recorded)
    assert run.engine == "toy"
    assert RAN_S * 1e6 <= run.ran_us < RAN_S * 1e6 + 50_000
    assert run.at - run.since >= (RAN_S + SLEPT_S) * 1e9 - 20e6
    assert run.ran_us + run.waited_us <= (run.at - run.since) / 1000 + 20_000


def test_worker_of_a_pool_records_each_generation_alone(recorded: list[Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(generate).result()
            time.sleep(SLEPT_S)
    runs = find_runs(recorded)
    assert len(runs) == 3
    for run in runs:
        assert RAN_S * 1e6 <= run.ran_us < RAN_S * 1e6 + 50_000
        assert run.at - run.since < (RAN_S + SLEPT_S) * 1e9 + 80e6


def test_generation_is_recorded_once(recorded: list[Any]) -> None:
    """A stream's end records it before `generate` returns."""
    writer = recorder.acquire_batch_writer("toy")
    assert writer is not None
    thread_counters.begin_thread_run()
    thread_counters.record_thread_run(writer, "toy")
    thread_counters.record_thread_run(writer, "toy")
    recorder.release_batch_writer("toy", writer)
    assert len(find_runs(recorded)) == 1


def test_kernel_without_counters_records_nothing(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(thread_counters, "_FOLDER", str(tmp_path))
    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert find_runs(recorded) == []
