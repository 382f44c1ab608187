"""How SGLang is started on a CPU, for which it has no build: with the replacements of tests/engines/sglang_on_cpu."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPLACEMENTS = ROOT / "tests" / "engines" / "sglang_on_cpu"
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{REPLACEMENTS}{os.pathsep}{ROOT}"}
OPTIONS = (
    "-m sglang.launch_server --model-path {model} --served-model-name tiny --host 127.0.0.1 --port {port} --device cpu "
    "--mem-fraction-static 0.1 --attention-backend torch_native --sampling-backend pytorch"
)


def make_command(sizes: str) -> tuple[str, ...]:
    """Returns the command, in which `{model}` and `{port}` are to be replaced. `sizes`: further options."""
    return (sys.executable, *f"{OPTIONS} {sizes}".split())
