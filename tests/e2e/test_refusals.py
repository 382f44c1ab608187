"""A signal that the destination refuses is named once on the server's stderr, in each way to export."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import HTTP, OtlpReceiver, status

RUN = (sys.executable, "-m", "otel_infer", "run", "--")
PROGRAM = """
import time
import otel_infer
otel_infer.instrument()
for _ in range(4):
    with otel_infer.request("chat", model="toy"):
        pass
    otel_infer.flush(20)
    time.sleep(0.4)
"""
SHORT_PROGRAM = """
import otel_infer
otel_infer.instrument()
with otel_infer.request("chat", model="toy"):
    pass
"""


@pytest.fixture
def receivers() -> Iterator[tuple[OtlpReceiver, OtlpReceiver]]:
    """One that accepts, and one that refuses."""
    with OtlpReceiver(HTTP) as accepting, OtlpReceiver(HTTP) as refusing:
        refusing.answer(status(400))
        yield accepting, refusing


def run_program(*launcher: str, program: str = PROGRAM, **variables: str) -> str:
    """Runs a program to its end and returns its stderr."""
    done = subprocess.run(
        [*launcher, sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [((), "sidecar"), ((), "in-process"), (RUN, "auto")],
    ids=["sidecar", "in-process", "run"],
)
@pytest.mark.parametrize(
    ("signal", "line"),
    [
        ("METRICS", "the destination refused metrics;"),
        ("TRACES", "the destination refused spans (HTTP 400);"),
    ],
)
def test_a_refused_signal_is_named_once(
    receivers: tuple[OtlpReceiver, OtlpReceiver], launcher: tuple[str, ...], mode: str, signal: str, line: str
) -> None:
    accepting, refusing = receivers
    path = f"/v1/{signal.lower()}"
    stderr = run_program(
        *launcher,
        **accepting.environ,
        **{f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT": refusing.endpoint + path},
        OTEL_INFER_MODE=mode,
    )
    assert stderr.count(line) == 1, stderr
    assert stderr.count("the destination refused") == 1, stderr


def test_a_program_under_run_hears_of_its_last_refusal(receivers: tuple[OtlpReceiver, OtlpReceiver]) -> None:
    """Its spans are sent after it ended."""
    stderr = run_program(*RUN, program=SHORT_PROGRAM, **receivers[1].environ, OTEL_METRICS_EXPORTER="none")
    assert stderr.count("the destination refused spans (HTTP 400);") == 1, stderr


def test_accepted_signals_are_not_named(receivers: tuple[OtlpReceiver, OtlpReceiver]) -> None:
    assert "refused" not in run_program(**receivers[0].environ)
