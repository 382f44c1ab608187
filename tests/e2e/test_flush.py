"""A flush returns whether the receiver accepted what was recorded, in the sidecar and in the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import HTTP, OtlpReceiver, status
from tests.support.toy_server import wait_until

PROGRAM = """
import sys
import otel_infer
otel_infer.instrument()
for line in sys.stdin:
    if "record" in line:
        with otel_infer.request("chat", model="toy"):
            pass
    print("flush" in line and otel_infer.flush(20), flush=True)
"""


class Program:
    """A program that records a request and flushes, when asked."""

    def __init__(self, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *commands: str) -> bool:
        """Records a request, flushes, or both in this order; returns the result of the flush."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(commands) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline() == "True\n"

    def stop(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver(HTTP) as receiver:
        yield receiver


@pytest.mark.parametrize("mode", ["sidecar", "in-process"])
@pytest.mark.parametrize(
    "signals",
    [
        {"OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"},
    ],
    ids=["spans", "cumulative metrics", "delta metrics"],
)
def test_a_flush_is_false_when_something_was_refused(
    receiver: OtlpReceiver, mode: str, signals: dict[str, str]
) -> None:
    """Only for the flush after it: what is accepted later does not fail."""
    program = Program(**receiver.environ, **signals, OTEL_INFER_MODE=mode)
    try:
        results = []
        for code in (200, 401, 200, 200):
            receiver.answer(status(code))
            results.append(program.ask("record", "flush"))
    finally:
        program.stop()
    assert results == [True, False, True, True]


@pytest.mark.parametrize("mode", ["sidecar", "in-process"])
def test_a_flush_knows_spans_that_were_refused_before_it(receiver: OtlpReceiver, mode: str) -> None:
    """Spans leave once a second, so nothing may be left to send when the flush begins."""
    program = Program(**receiver.environ, OTEL_METRICS_EXPORTER="none", OTEL_INFER_MODE=mode)
    try:
        assert program.ask("record", "flush")
        receiver.answer(status(401))
        before = len(receiver.requests)
        program.ask("record")
        assert receiver.wait_for(lambda it: len(it.requests) > before)
        receiver.answer(status(200))
        assert [program.ask("flush"), program.ask("flush")] == [False, True]
    finally:
        program.stop()


KILLS_ITS_CHILDREN = """
import os, signal
import otel_infer
otel_infer.instrument()
with otel_infer.request("chat", model="toy"):
    pass
from otel_infer._bootstrap.install import installation
os.kill(installation.sidecar.pid, signal.SIGKILL)
"""


def test_a_program_that_kills_all_its_children_before_its_exit_is_exported(receiver: OtlpReceiver) -> None:
    """As SGLang's engine does when it shuts down."""
    command = [sys.executable, "-c", KILLS_ITS_CHILDREN]
    subprocess.run(command, env={**os.environ, **receiver.environ}, check=True, timeout=30)
    wait_until(lambda: [span for span in receiver.spans if span["name"] == "chat toy"])
