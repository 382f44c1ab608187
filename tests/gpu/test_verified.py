"""The results of `python -m benchmarks.gpu_verify` on this device pass their gates. It takes minutes: `-m gpu -k verified`.

The whole server takes nine of them: `-m gpu -k "verified and whole"`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import verdict

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("parts", "file"), [((), "gpu-*.json"), (("--only", "whole"), "whole-gpu-*.json")], ids=["parts", "whole"]
)
def test_every_gate_passes(parts: tuple[str, ...], file: str, tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_verify", "--out", str(tmp_path), *parts], check=False
    )
    assert completed.returncode in (0, 1)
    (results,) = tmp_path.glob(file)
    failed = {line.claim: line.value for line in verdict.load_lines(results) if line.verdict == verdict.FAIL}
    assert failed == {}
