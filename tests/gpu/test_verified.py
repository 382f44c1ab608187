"""What `python -m benchmarks.gpu_verify` found on this device, held against its gates. Minutes long: `-m gpu -k verified`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import verdict

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_every_line_with_a_gate_is_verified(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_verify", "--out", str(tmp_path)], check=False
    )
    assert done.returncode in (0, 1)
    (found,) = tmp_path.glob("gpu-*.json")
    failed = {line.claim: line.value for line in verdict.loaded(found) if line.verdict == verdict.FAIL}
    assert failed == {}
