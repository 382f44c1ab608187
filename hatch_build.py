"""Builds the compiled ring writer into the wheel, where there is a C compiler; without one the wheel is pure Python.

The module uses the stable ABI of Python 3.11: one build serves all later releases. A Python without a GIL has no
stable ABI, so it gets the Python code.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "otel_infer/ringbuffer/_native.c",
    "otel_infer/ringbuffer/_stack_signal.c",
    "otel_infer/tracing/_request_state.c",
    "otel_infer/sidecar/probes/stalls/_stall_watch.c",
    "otel_infer/instrumentation/asgi/_exchange.c",
    "otel_infer/instrumentation/http_server/_event_loop_lag.c",
    "otel_infer/instrumentation/asgi/_socket_wait.c",
    "otel_infer/instrumentation/hooks/_context_hooks.c",
    "otel_infer/instrumentation/hooks/_queue_hooks.c",
    "otel_infer/instrumentation/_model_calls.c",
    "otel_infer/instrumentation/torch/_forward.c",
    "otel_infer/instrumentation/hooks/_compiled_hook.c",
    "otel_infer/instrumentation/transformers/_requests.c",
    "otel_infer/instrumentation/transformers/_generation.c",
    "otel_infer/instrumentation/transformers/_batches.c",
    "otel_infer/instrumentation/vllm/_scheduler.c",
)
MODULE = "otel_infer/ringbuffer/_native.abi3.so"
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden")
LINUX_FLAGS = ("-fno-plt", "-Wl,-z,now")
"""Calls of the interpreter jump directly: with cold caches, a hook takes a tenth less."""


class CompiledRingWriter(BuildHookInterface):
    """Compiles `SOURCES` in place, which serves wheels and editable installations alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        problem = compile_module([root / source for source in SOURCES], root / MODULE)
        if problem:
            self.app.display_warning(f"otel-infer is built without its compiled ring writer: {problem}")
            return
        build_data["artifacts"].append(MODULE)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


def compile_module(sources: list[Path], module: Path) -> str:
    """Compiles C files into a shared library. Returns why that is impossible; empty on success."""
    module.unlink(missing_ok=True)
    if os.environ.get("OTEL_INFER_NATIVE") == "off" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is switched off, or this Python has no stable ABI"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = [*FLAGS, *(LINUX_FLAGS if sys.platform == "linux" else ()), f"-I{sysconfig.get_path('include')}"]
    try:
        subprocess.run(
            [*compiler, *flags, *map(str, sources), "-o", str(module)],
            check=True,
            capture_output=True,
            text=True,
        )
    except OSError as exc:
        return f"{compiler[0]}: {exc.strerror}"
    except subprocess.CalledProcessError as exc:
        return (exc.stderr.strip().splitlines() or [f"{compiler[0]} failed"])[0]
    return ""
