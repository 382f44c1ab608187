"""Runs one draw: a server under `otel-infer run --tape`, its load and its companions. Explains a tape."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.battery import companions, faults
from benchmarks.battery.load import Load, TimedRequest
from benchmarks.battery.servers import Server
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.demo.model import make_demo_model, make_tokenizer, save_model

ROOT = Path(__file__).resolve().parents[2]
READY_S, STOP_S = 240.0, 30.0
VARIABLES = {
    "OTEL_TRACES_EXPORTER": "none",
    "OTEL_METRICS_EXPORTER": "none",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_draw(server: Server, fault: str, number: int, folder: Path) -> dict[str, Any]:
    """Runs the draw and returns what the client measured. The tape is in `folder` afterwards."""
    rng = random.Random(f"{server.name} {fault} {number}")
    return run_case(server, faults.FAULTS[fault].draw(rng, server), folder, folder.parents[1])


def run_case(server: Server, case: faults.Case, folder: Path, models: Path) -> dict[str, Any]:
    """Runs a drawn fault, as `run_draw` does. `models`: the folder of the models."""
    folder.mkdir(parents=True, exist_ok=True)
    port, model = find_free_port(), make_model(server, models)
    with contextlib.ExitStack() as stack:
        mistakes = dict(case.mistakes)
        if case.database_s:
            database = stack.enter_context(companions.SlowDatabase(case.database_s))
            mistakes["database_port"] = database.port
        process = start_server(server, case, folder, port, model, mistakes)
        stack.callback(stop_server, process)
        if not wait_until_healthy(f"http://127.0.0.1:{port}", lambda: process.poll() is None, READY_S):
            raise RuntimeError(f"{server.name} did not start, see {folder / 'server.log'}")
        warm = [TimedRequest(0.1 * i, 20, min(server.tokens[1], 8)) for i in range(4)]
        refused = {one.status for one in make_load(server, port, model, warm).run()} - {200}
        if refused:
            raise RuntimeError(f"{server.name} answers {refused}, see {folder / 'server.log'}")
        time.sleep(0.5)
        stack.enter_context(companions.run_hogs(case.hogs, case.niceness))
        began_at = time.time()
        answers = make_load(server, port, model, case.requests).run()
    return {
        "began_at": began_at,
        "answers": [asdict(answer) for answer in answers],
        "mistakes": case.mistakes,
        "hogs": case.hogs,
    }


def make_load(server: Server, port: int, model: Path, requests: list[TimedRequest]) -> Load:
    """Returns the load of these requests."""
    name = "tiny" if server.name in ("vllm", "sglang") else str(model)
    return Load(port, server.kind, name, requests, server.fields)


def make_model(server: Server, folder: Path) -> Path:
    """Returns the folder of the model, which is made once."""
    if server.kind == "embeddings":
        path = folder / "model-bert"
        if not path.exists():
            make_encoder(path)
        return path
    if server.name == "llama-cpp":
        return make_gguf(folder)
    path = folder / "model-llama"
    return path if path.exists() else make_demo_model(path, layers=4, hidden=128)


def make_gguf(folder: Path) -> Path:
    """Returns the file of a Llama for llama.cpp, of the size of a small one, so that a token takes some ms."""
    from tests.engines import gguf_models

    path, tokenizer = folder / "model-llama.gguf", folder / "tokenizer"
    if not path.exists():
        make_tokenizer().save_pretrained(tokenizer)
        gguf_models.make_gguf(path, tokenizer, gguf_models.Shape(8, 8, 4, 512, 1536, 4096))
    return path


def make_encoder(folder: Path) -> None:
    """Writes a BERT of random weights and the size of a small one, so that a request takes tens of ms."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    save_model(folder, BertModel(config).eval(), tokenizer)


def start_server(
    server: Server, case: faults.Case, folder: Path, port: int, model: Path, mistakes: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """Starts a server under `otel-infer run --tape`; the tape and its log are in `folder`."""
    values = {"{port}": str(port), "{model}": str(model), "{mistakes}": json.dumps(mistakes)}
    command = [values.get(part, part) for part in (*server.command, *case.arguments)]
    run = [sys.executable, "-m", "otel_infer", "run", "--tape", str(folder / "server.tape"), "--"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ = {**kept, "PYTHONPATH": str(ROOT), **VARIABLES, **server.variables, **case.variables}
    if case.log_kb_s:
        process = subprocess.Popen([*run, *command], env=environ, stderr=subprocess.PIPE)
        assert process.stderr is not None
        companions.read_slowly(process.stderr, case.log_kb_s)
        return process
    with (folder / "server.log").open("wb") as log:
        return subprocess.Popen([*run, *command], env=environ, stdout=log, stderr=log)


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """Ends a server, so that its tape is complete."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def explain_tape(tape: Path, began_at: float) -> dict[str, Any]:
    """Returns what `explain --json` reports about a tape, alone. `began_at`: of the load after the warm-up, unix s."""
    since = datetime.fromtimestamp(began_at).astimezone().isoformat()
    command = [sys.executable, "-m", "otel_infer", "explain", str(tape), "--since", since]
    done = subprocess.run([*command, "--json", "--worst", "10000"], capture_output=True, check=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(done.stdout)
    return report
