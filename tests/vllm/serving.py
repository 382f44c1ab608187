"""A real vLLM on the CPU with a tiny model, and its client."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.served import RUN, Server, free_port

ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}
READY_S = 240.0


def vllm_serve(
    model: Path, log: Path, environ: Mapping[str, str], *options: str, launcher: Sequence[str] = RUN
) -> Server:
    """vLLM's OpenAI server behind a launcher; not started."""
    port = free_port()
    command = [*launcher, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32".split()
    command += "--max-model-len 512 --max-num-seqs 8 --enforce-eager".split()
    return Server([*command, *options], port, log, {**ENVIRON, **environ})
