"""SGLang on a CPU: `sglang_app PORT`. Needs `.venv-sglang`. DELAY and DELAY_S: `tests/engines/sglang_on_cpu/sglang_delays.py`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks import sglang_on_cpu
from tests.support.tiny import make_model

SIZES = "--max-total-tokens 16384 --context-length 512 --max-running-requests 8"

if __name__ == "__main__":
    os.environ["SGLANG_USE_CPU_ENGINE"] = os.environ["OMP_NUM_THREADS"] = "1"
    # After our own sitecustomize, which runs the next one.
    os.environ["PYTHONPATH"] += f"{os.pathsep}{sglang_on_cpu.REPLACEMENTS}"
    values = {"{model}": str(make_model(Path(tempfile.mkdtemp()) / "tiny")), "{port}": sys.argv[1]}
    os.execv(sys.executable, [values.get(part, part) for part in sglang_on_cpu.make_command(SIZES)])
