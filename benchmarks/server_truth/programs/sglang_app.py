"""SGLang on a CPU: `sglang_app PORT`. Needs `.venv-sglang`. DELAY and DELAY_S: `tests/engines/sglang_on_cpu/sglang_delays.py`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.engines.sglang_on_cpu.torchvision_operators import declare_operators
from tests.support.tiny import make_model

SHIMS = Path(__file__).parents[3] / "tests" / "engines" / "sglang_on_cpu"
OPTIONS = (
    "--served-model-name tiny --host 127.0.0.1 --device cpu --mem-fraction-static 0.1 --attention-backend torch_native "
    "--sampling-backend pytorch --max-total-tokens 16384 --context-length 512 --max-running-requests 8"
)

if __name__ == "__main__":
    os.environ["SGLANG_USE_CPU_ENGINE"] = os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] += f"{os.pathsep}{SHIMS}"  # after our own sitecustomize, which runs the next one
    declare_operators()
    model = make_model(Path(tempfile.mkdtemp()) / "tiny")
    options = ["--model-path", str(model), "--port", sys.argv[1], *OPTIONS.split()]
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *options])
