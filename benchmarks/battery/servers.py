"""The servers of the battery: their commands, and the load that they bear without a fault."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field

from benchmarks import sglang_on_cpu

PROGRAMS = "benchmarks.battery.programs"
VLLM_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Server:
    """A server. `{port}`, `{model}` and `{mistakes}` in the command are replaced; `rate`: requests/s that it bears.

    `crowded_rate`: requests/s from which some run at the same time; 0 = `rate`.

    `kind`: of its load. `tokens`: output tokens of a usual request. `needs`: the module without which it can't run.
    `fields`: of the body of a request.
    """

    name: str
    title: str
    command: tuple[str, ...]
    kind: str
    rate: float
    tokens: tuple[int, int] = (1, 1)
    needs: str = "transformers"
    variables: dict[str, str] = field(default_factory=dict)
    fields: dict[str, bool] = field(default_factory=dict)
    crowded_rate: float = 0.0

    @property
    def has_mistakes(self) -> bool:
        """Whether the server is a program of ours, which can have mistakes in its code."""
        return "{mistakes}" in self.command

    @property
    def can_run(self) -> bool:
        """Whether this Python environment has what the server needs."""
        return importlib.util.find_spec(self.needs) is not None


def _run_program(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"{PROGRAMS}.{name}", "{port}", "{model}", "{mistakes}")


TRANSFORMERS = (sys.executable, "-c", "from transformers.cli.transformers import main; main()")
SERVE = "serve {model} --host 127.0.0.1 --port {port} --continuous-batching --device cpu --cb-num-blocks 256"
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
VLLM_OPTIONS = (
    "--model {model} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 2048 "
    "--max-num-seqs 8 --enforce-eager"
)

SGLANG_SIZES = (
    "--max-total-tokens 16384 --context-length 4096 --max-running-requests 8 --chunked-prefill-size 512"
)

SERVERS = {
    server.name: server
    for server in (
        Server(
            "generate-threads", "FastAPI, generate in threads", _run_program("generate_threads"),
            "chat-stream", 1.2, (16, 40), "fastapi", crowded_rate=2.0,
        ),
        Server(
            "generate-async", "FastAPI, generate in async def", _run_program("generate_async"),
            "chat", 2.0, (16, 40), "fastapi",
        ),
        Server(
            "transformers-serve", "transformers serve, continuous batching", (*TRANSFORMERS, *SERVE.split()),
            "chat-stream", 4.0, (16, 40),
        ),
        Server(
            "vllm", "vLLM on a CPU", (*VLLM, *VLLM_OPTIONS.split()),
            "chat-stream", 4.0, (16, 40), "vllm", VLLM_VARIABLES, {"ignore_eos": True},
        ),
        Server(
            "sglang", "SGLang on a CPU", sglang_on_cpu.make_command(SGLANG_SIZES),
            "chat-stream", 3.0, (16, 40), "sglang", sglang_on_cpu.VARIABLES, {"ignore_eos": True},
        ),
        Server(
            "llama-cpp", "llama-cpp-python, its server", _run_program("llama_server"),
            "chat-stream", 2.0, (16, 40), "llama_cpp",
        ),
        Server(
            "embeddings", "FastAPI, sentence-transformers", _run_program("embeddings"),
            "embeddings", 4.0, needs="sentence_transformers",
        ),
        Server("batcher", "FastAPI, a batcher by hand", _run_program("batcher"), "embeddings", 4.0, needs="fastapi"),
        Server(
            "flask-gunicorn", "Flask, gunicorn sync, two workers", _run_program("flask_embeddings"),
            "embeddings", 4.0, needs="flask",
        ),
    )
}  # fmt: skip
"""By name."""
