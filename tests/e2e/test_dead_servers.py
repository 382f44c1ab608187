"""Requests of a killed server are exported only to the destination they were recorded for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.support.arrivals import lost, requests_of
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.toy_server import Toy, processes, wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def rings() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-dead-servers-"))
    yield folder
    shutil.rmtree(folder)


def kill_in_flight(log: Path, rings: Path, receiver: OtlpReceiver) -> set[str]:
    """Kills a server and its sidecar during requests; returns the traces of the requests without an answer."""
    toy = Toy(log, {**receiver.environ, "OTEL_INFER_RINGS": str(rings), "TOY_STEP_S": "0.02"})
    with toy, toy.load(threads=3, tokens=500) as replies:
        assert toy.post("/flush", {"timeout": 10}).body["flushed"]
        time.sleep(0.3)
        for pid in processes(toy.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return {reply.trace_id for reply in replies[:3]}


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
def test_a_dead_server_is_exported_to_its_own_destination_only(
    tmp_path: Path, rings: Path, is_same: bool
) -> None:
    with OtlpReceiver() as first, OtlpReceiver() as second:
        in_flight = kill_in_flight(tmp_path / "first.log", rings, first)
        receiver = first if is_same else second
        with Toy(tmp_path / "second.log", {**receiver.environ, "OTEL_INFER_RINGS": str(rings)}) as toy:
            answered = toy.chat().trace_id
            assert toy.post("/flush", {"timeout": 10}).body["flushed"]
            wait_until(lambda: answered in requests_of(receiver))
            counted = lost(receiver).get(semconv.LOSS_OTHER_DESTINATION, 0)
            if is_same:
                wait_until(lambda: in_flight <= set(requests_of(first)))
                assert counted == 0
            else:
                assert not in_flight & (set(requests_of(first)) | set(requests_of(second)))
                wait_until(lambda: lost(second).get(semconv.LOSS_OTHER_DESTINATION, 0) >= len(in_flight))
