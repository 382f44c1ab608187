"""Real vLLM servers on the CPU with a tiny model."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.served import RUN, Server, free_port

STALL = "OTEL_INFER_TEST_STALL"
"""Names the environment variable with the path of the stall file."""

ROOT = Path(__file__).parents[2]
ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}
READY_S = 240.0
MODEL = "tiny"
SEQUENCES = 8
"""Sequences that run at once."""


def command(model: Path, port: int) -> list[str]:
    """Returns the command of vLLM's OpenAI server."""
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    arguments += f"--served-model-name {MODEL} --host 127.0.0.1 --port {port} --dtype float32".split()
    return arguments + f"--max-model-len 512 --max-num-seqs {SEQUENCES} --enforce-eager".split()


def vllm_serve(
    model: Path, log: Path, environ: Mapping[str, str], *options: str, launcher: Sequence[str] = RUN
) -> Server:
    """Returns vLLM's OpenAI server behind a launcher, not started."""
    port = free_port()
    stall = {STALL: str(log.with_suffix(".stall"))}
    return Server([*launcher, *command(model, port), *options], port, log, {**ENVIRON, **stall, **environ})


def engine_core(server: Server) -> int:
    """Returns the process id of the engine core, from vLLM's log."""
    found = re.findall(r"\(EngineCore\S* pid=(\d+)\)", server.log.read_text(errors="replace"))
    return int(found[-1])


def sidecars(server: Server) -> list[int]:
    """Returns the process ids of the server's sidecars."""
    mark = f"{STALL}={server.log.with_suffix('.stall')}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
            if marked and b"otel_infer-sidecar" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
