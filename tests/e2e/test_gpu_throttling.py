"""GPU throttling during a recording is a cause in every command that reads the tape."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import RUN

ROOT = Path(__file__).parents[2]
CAUSE = "gpu_throttled"


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tape of the fake device, recorded with a stub NVML that reports throttled GPUs."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("throttled")
    stub = ROOT / "tests" / "support" / "nvml_stub.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", stub], check=True)
    path = folder / "throttled.tape"
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": str(ROOT),
        "OTEL_INFER_TAPE": str(path),
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
    }
    command = [*RUN, sys.executable, str(ROOT / "tests" / "support" / "throttled_loop.py")]
    subprocess.run(command, env=environ, check=True, timeout=60)
    return path


def read(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "otel_infer", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def slowest(requests: list[dict[str, Any]]) -> dict[str, Any]:
    return max(requests, key=lambda request: request["duration_ms"])


def test_explain_attributes_latency_to_throttled_clocks(tape: Path) -> None:
    diagnosis = json.loads(read("explain", "--json", str(tape)))
    assert diagnosis["causes"][CAUSE] > 0.3
    assert slowest(diagnosis["worst"])["causes_ms"][CAUSE] > 300
    assert CAUSE in read("explain", str(tape))


def test_replay_attributes_latency_to_throttled_clocks(tape: Path) -> None:
    requests = [json.loads(line) for line in read("replay", "--json", str(tape)).splitlines()]
    attributed = sorted(request["causes_ms"].get(CAUSE, 0) for request in requests)
    assert slowest(requests)["causes_ms"][CAUSE] == attributed[-1] > 300 > 10 * attributed[-2]


def test_the_report_names_throttled_clocks(tape: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    read("report", str(tape), "--out", str(page))
    assert CAUSE in page.read_text()
