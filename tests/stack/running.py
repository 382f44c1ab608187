"""The stack: real servers under load, which a real Prometheus scrapes.

python -m tests.stack.running FOLDER         runs it until SIGINT or SIGTERM, and prints the URL of Prometheus
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from tests.stack.load import Load, chat_client, classify_client, loop_client
from tests.stack.processes import Prometheus
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import RUN, Server, free_port, transformers_serve
from tests.vllm.serving import ENVIRON, MODEL, command

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "support" / "nvml_stub.c"
VLLM = Path(os.environ.get("OTEL_INFER_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
READY_S = 240.0
LOOP = {
    "max_batch": 8, "prompt_ms": 0.1, "kv_blocks": 260, "preempted_ms": 30, "longest_prompt": 3000,
    "gc_every_ms": 2000, "gc_objects": 60_000,
}  # fmt: skip
SLO = "ttft=250ms,itl=75ms,e2e=3s"
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'


class Stack(NamedTuple):
    """The running stack. `receiver` receives the spans."""

    prometheus: Prometheus
    receiver: OtlpReceiver
    ports: dict[str, int]


def make_environ(receiver: OtlpReceiver, **more: str) -> tuple[int, dict[str, str]]:
    """Returns a port to scrape, and the environment of a server that exports spans to the receiver."""
    port = free_port()
    environ = {**receiver.environ, "OTEL_METRICS_EXPORTER": "none", "OTEL_INFER_METRICS_PORT": str(port)}
    return port, {
        **environ,
        "OTEL_INFER_SLO": SLO,
        "OTEL_INFER_STEP_BUDGET": "150",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def loop_server(log: Path, environ: dict[str, str], **faults: float) -> Server:
    """Returns a server of the hand-written loop on a fake GPU."""
    port = free_port()
    server = [sys.executable, str(ROOT / "tests" / "stack" / "loop_server.py"), str(port), json.dumps(faults)]
    return Server([*RUN, *server], port, log, environ, "/")


def batch_server(log: Path, environ: dict[str, str]) -> Server:
    """Returns a classifier whose requests wait in an asyncio.Queue for their batch."""
    port = free_port()
    app = [sys.executable, "-m", "uvicorn", "--port", str(port), "tests.servers.apps.batcher_app:app"]
    return Server([*RUN, *app, "--log-level", "error"], port, log, environ, "/health")


def vllm_server(model: Path, log: Path, environ: dict[str, str]) -> Server:
    """Returns a real vLLM on the CPU, in its own virtual environment, with few KV blocks."""
    port = free_port()
    arguments = [*command(model, port), *"--num-gpu-blocks-override 24 --block-size 32".split()]
    launched = [str(VLLM) if part == sys.executable else part for part in (*RUN, *arguments)]
    return Server([*launched, "--speculative-config", SPECULATION], port, log, {**ENVIRON, **environ})


def find_compiler() -> str | None:
    """Returns the path of a C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def build_nvml_stub(folder: Path) -> dict[str, str]:
    """Returns the environment in which NVML is a stub with two GPUs."""
    subprocess.run(
        [find_compiler() or "cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", STUB], check=True
    )
    return {"LD_LIBRARY_PATH": str(folder), "NVML_STUB_MOVES": "1"}


@contextmanager
def run_stack(folder: Path, model: Path) -> Iterator[Stack]:
    """Runs all servers under load."""
    with OtlpReceiver() as receiver, ExitStack() as exit_stack:
        off = {"OTEL_INFER_GPU_METRICS": "off"}
        targets: dict[str, int] = {}
        environs: dict[str, dict[str, str]] = {}
        for name, more in (
            ("loop", build_nvml_stub(folder)),
            ("transformers", off),
            ("vllm", off),
            ("batch", off),
        ):
            targets[name], environs[name] = make_environ(receiver, **more)
        logs = {name: folder / f"{name}.log" for name in targets}
        servers = {
            "vllm": vllm_server(model, logs["vllm"], environs["vllm"]),
            "loop": loop_server(logs["loop"], environs["loop"], **LOOP),
            "transformers": transformers_serve(
                model, logs["transformers"], environs["transformers"], batching=True
            ),
            "batch": batch_server(logs["batch"], environs["batch"]),
        }
        for server in servers.values():
            exit_stack.callback(lambda started=server: started.process and started.stop())
            server.start(READY_S)
        rules = folder / "rules.yml"
        rules.write_text(
            rules_to_yaml(
                burn_rate_rules.build_rule_groups(
                    slo_spec.DEFAULT_SPEC._replace(windows=slo_spec.DEMO_WINDOWS, minimum=5)
                )
            )
        )
        prometheus = Prometheus(folder, targets, [rules], every="5s")
        exit_stack.callback(prometheus.stop)
        ports = {name: server.port for name, server in servers.items()}
        for load in (
            Load(loop_client(ports["loop"]), 14, 0.4),
            Load(chat_client(ports["transformers"], str(model)), 2, 0.3),
            Load(chat_client(ports["vllm"], MODEL), 5, 0.5),
            Load(classify_client(ports["batch"]), 4, 0.2),
        ):
            exit_stack.callback(load.stop)
        yield Stack(prometheus, receiver, ports)


if __name__ == "__main__":
    from tests.support.tiny import make_model

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with run_stack(folder, make_model(folder / "model")) as stack:
        print(stack.prometheus.url, flush=True)
        try:
            time.sleep(86_400)
        except KeyboardInterrupt:
            print("stopping")
