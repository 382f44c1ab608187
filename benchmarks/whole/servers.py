"""The servers that are measured, with their loads."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import sglang_on_cpu

TOKENS = 96
END_OF_TEXT = 2
"""The token that ends a text of the demo's model. llama-cpp-python's server has no `ignore_eos`."""
PROGRAMS = "benchmarks.whole.programs"
ON_CPU = "--device cpu --cb-num-blocks 256 --cb-max-batch-tokens 512"
CHAT = "/v1/chat/completions"
DECODE_ONLY = json.dumps({"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"})
COUNT_TOKENS = {"include_usage": True, "continuous_usage_stats": True}
VLLM_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class ServedLoad:
    """A server and its load. `{port}` and `{model}` in the command are replaced."""

    name: str
    title: str
    command: tuple[str, ...]
    kind: str
    number: int
    options: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    is_cpu_gated: bool = False
    sample_rate: int = 25
    health: str = "/health"
    """Empty: the server is ready once it accepts connections."""

    @property
    def unit(self) -> str:
        """The unit of the load."""
        return "token" if self.kind == "streams" else "request"


def list_servers() -> list[ServedLoad]:
    """Returns the servers that this Python environment can run."""
    if importlib.util.find_spec("vllm"):
        return list_vllm_servers()
    if importlib.util.find_spec("sglang"):
        return list_sglang_servers()
    if importlib.util.find_spec("llama_cpp"):
        return list_engine_servers()
    return list_classifiers() if importlib.util.find_spec("litserve") else list_other_servers()


def list_all_servers() -> list[ServedLoad]:
    """Returns the servers of all environments."""
    return [
        *list_other_servers(),
        *list_classifiers(),
        *list_vllm_servers(),
        *list_sglang_servers(),
        *list_engine_servers(),
    ]


def list_vllm_servers() -> list[ServedLoad]:
    """Returns the servers that need vLLM."""
    return [_serve_vllm(number) for number in (8, 32)]


def list_sglang_servers() -> list[ServedLoad]:
    """Returns the servers that need SGLang."""
    return [_serve_sglang(number) for number in (8, 32)]


def list_engine_servers() -> list[ServedLoad]:
    """Returns the servers that need the other engines of `make test-engines`."""
    return [
        _serve_llama(),
        _serve_requests("onnxruntime", "FastAPI + ONNX Runtime", _run_program("onnx_classifier"), 100),
    ]


def list_other_servers() -> list[ServedLoad]:
    """Returns the servers that do not need vLLM."""
    return [
        *(serve_transformers(number) for number in (1, 8, 32, 128)),
        *(_serve_generate(number) for number in (1, 4)),
        _serve_requests("batcher", "a hand-made batcher", _run_program("batcher"), 200),
        _serve_requests("forward", "FastAPI + forward", _run_program("classifier"), 100),
    ]


def list_classifiers() -> list[ServedLoad]:
    """Returns the servers that need the libraries of `make test-servers`."""
    gunicorn = f"-m gunicorn -b 127.0.0.1:{{port}} -w 2 {PROGRAMS}.flask_classifier:app"
    return [
        _serve_requests("flask-gunicorn", "Flask under gunicorn, 2 workers", gunicorn.split(), 100),
        _serve_requests("grpc-aio", "grpc.aio", _run_program("grpc_classifier"), 100, is_grpc=True),
        _serve_requests("litserve", "LitServe, batches", _run_program("litserve_classifier"), 100),
    ]


def _run_program(name: str) -> tuple[str, ...]:
    return "-m", f"{PROGRAMS}.{name}", "{port}"


def _stream_options(**changes: Any) -> dict[str, Any]:
    return {"path": CHAT, "tokens": TOKENS, "model": "{model}", **changes}


def _name_streams(number: int) -> str:
    return f"{number} stream" + "s" * (number > 1)


def serve_transformers(
    number: int, where: str = "", options: str = ON_CPU, tokens: int = TOKENS
) -> ServedLoad:
    """Returns `transformers serve` with so many streams. `options`: of its command line."""
    main = (sys.executable, "-c", "from transformers.cli.transformers import main; main()")
    command = "serve {model} --host 127.0.0.1 --port {port} --continuous-batching"
    return ServedLoad(
        f"transformers-serve-{number}",
        f"transformers serve{where}, {_name_streams(number)}",
        (*main, *command.split(), *options.split()),
        "streams",
        number,
        _stream_options(tokens=tokens),
    )


def _serve_generate(number: int) -> ServedLoad:
    return ServedLoad(
        f"generate-{number}",
        f"FastAPI + generate + streamer, {_name_streams(number)}",
        (sys.executable, *_run_program("generate"), "{model}"),
        "streams",
        number,
        _stream_options(),
    )


def _serve_vllm(number: int) -> ServedLoad:
    command = "--model {model} --served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32"
    sizes = "--max-model-len 512 --max-num-seqs 32 --enforce-eager --no-enable-prefix-caching"
    return ServedLoad(
        f"vllm-{number}",
        f"vLLM on a CPU, decode only, {_name_streams(number)}",
        (
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *f"{command} {sizes} --kv-transfer-config".split(),
            DECODE_ONLY,
        ),
        "streams",
        number,
        _stream_options(model="tiny", extra={"ignore_eos": True, "stream_options": COUNT_TOKENS}),
        VLLM_VARIABLES,
    )


def _serve_sglang(number: int) -> ServedLoad:
    sizes = "--max-total-tokens 16384 --context-length 512 --max-running-requests 32"
    return ServedLoad(
        f"sglang-{number}",
        f"SGLang on a CPU, {_name_streams(number)}",
        sglang_on_cpu.make_command(sizes),
        "streams",
        number,
        _stream_options(model="tiny", extra={"ignore_eos": True, "stream_options": COUNT_TOKENS}),
        sglang_on_cpu.VARIABLES,
    )


def _serve_llama() -> ServedLoad:
    return ServedLoad(
        "llama-cpp-1",
        "llama-cpp-python's server, 1 stream",
        (sys.executable, *_run_program("llama_server"), "{model}"),
        "streams",
        1,
        _stream_options(extra={"logit_bias": {str(END_OF_TEXT): -100}}),
    )


def _serve_requests(
    name: str, title: str, arguments: Sequence[str], rate: int, is_grpc: bool = False
) -> ServedLoad:
    """Returns a classifier with so many requests per second. `arguments`: of the interpreter."""
    return ServedLoad(
        name,
        f"{title}, {rate} requests/s",
        (sys.executable, *arguments),
        "calls" if is_grpc else "requests",
        rate,
        {"path": "/classes.Classes/Classify" if is_grpc else "/classify"},
        {"MODEL": "{model}"},
        is_cpu_gated=True,
        sample_rate=100,
        health="" if is_grpc else "/health",
    )
