"""OTEL_PROPAGATORS may name a propagator that is not installed: the server continues without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
USE = (
    "import otel_infer; otel_infer.instrument()\n"
    "with otel_infer.stage('search'): pass\n"
    "from opentelemetry import propagate\n"
    "print([type(one).__name__ for one in propagate.get_global_textmap()._propagators])"
)
W3C = "['TraceContextTextMapPropagator', 'W3CBaggagePropagator']"
MISSING = "'xray' is not installed (pip install opentelemetry-propagator-aws-xray)"


def run_python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("propagators", "loaded", "message"),
    [
        ("tracecontext,baggage,xray", W3C, MISSING),
        ("xray", W3C, MISSING),
        ("baggage,nope", "['W3CBaggagePropagator']", "'nope' is misspelled or not installed"),
        ("none", "[]", ""),
        ("tracecontext,baggage", W3C, ""),
    ],
)
def test_a_missing_propagator_is_left_out_and_reported(propagators: str, loaded: str, message: str) -> None:
    done = run_python("-c", USE, OTEL_PROPAGATORS=propagators)
    assert done.stdout.strip() == loaded, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == bool(message)


@pytest.mark.parametrize("switch", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_INFER_ENABLED": "off"}], ids=str)
def test_a_disabled_server_starts_with_a_missing_propagator(switch: dict[str, str]) -> None:
    done = run_python("-c", USE, OTEL_PROPAGATORS="b3", **switch)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [(["--version"], 0), (["run", "--", sys.executable, "-c", ""], 0)],
    ids=["version", "run"],
)
def test_commands_work_with_a_missing_propagator(command: list[str], status: int) -> None:
    done = run_python("-m", "otel_infer", *command, OTEL_PROPAGATORS="b3")
    assert (status, False) == (done.returncode, "Traceback" in done.stderr), done.stderr


def test_doctor_names_a_missing_propagator() -> None:
    done = run_python("-m", "otel_infer", "doctor", "--no-imports", OTEL_PROPAGATORS="tracecontext,xray")
    assert "pip install opentelemetry-propagator-aws-xray" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
