"""GuideLLM and AIPerf as clients. They send no `traceparent`, so percentiles of the distributions are compared.

python -m benchmarks.truth --client aiperf # `aiperf` or `guidellm` on the PATH, or AIPERF= / GUIDELLM=PATH
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.served import Served
from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer.assembly.records.request import RequestRecord

PROMPT, OUTPUT = 64, 48
PERCENTILES = (50, 95)
TIMEOUT_S = 900
MEDIAN_MS, P95_MS, SHARE = 5.0, 15.0, 5.0


class Latencies(NamedTuple):
    """The latencies of a client's requests, ms."""

    ttft: Any
    e2e: Any
    itl: Any


def compare_client(client: str, requests: int, concurrency: int) -> list[Line]:
    """Runs this client once against an instrumented server."""
    program = os.environ.get(client.upper()) or shutil.which(client)
    if not program:
        raise SystemExit(f"{client} is not installed: pip install {client}, or {client.upper()}=/path/to/it")
    command, read = CLIENTS[client]
    served = Served()
    with served:
        began = time.monotonic_ns()
        folder = served.folder / "client"
        folder.mkdir()
        arguments = [program, *command(served, folder, requests, concurrency)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_HUB_OFFLINE", "OTEL_"))}
        completed = subprocess.run(
            arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if completed.returncode != 0:
            raise SystemExit(
                f"{client} failed with status {completed.returncode}:\n{completed.stdout[-1500:]}\n{completed.stderr[-1500:]}"
            )
        latencies = read(folder)
    ours = [
        record for record in served.read_records() if record.arrived_at > began and record.output_tokens > 1
    ]
    served.remove_files()
    return _make_lines(client, latencies, ours)


def _make_lines(client: str, reported: Latencies, records: list[RequestRecord]) -> list[Line]:
    """Returns the rows. The client's warm-up comes first and is not in its report, so the last records are used."""
    records = sorted(records, key=lambda record: record.arrived_at)[-len(reported.ttft) :]
    ours = Latencies(
        np.array([record.ttft_ns for record in records]) / 1e6,
        np.array([record.duration_ns for record in records]) / 1e6,
        np.array([record.gaps_ns().mean() for record in records if record.steps is not None]) / 1e6,
    )
    lines = []
    for name, theirs, mine in zip(("TTFT", "E2E"), reported, ours):
        for percent in PERCENTILES:
            there, here = np.percentile(theirs, percent), np.percentile(mine, percent)
            note = f"{client} {there:.2f} ms over {len(theirs)}, ours {here:.2f} ms over {len(mine)}"
            limit = MEDIAN_MS if percent == 50 else max(P95_MS, there * SHARE / 100)
            figure = make_exact(float(there - here))
            lines.append(
                make_line(f"{client}: {name} p{percent}, client − ours", "ms", figure, Gate(limit), note=note)
            )
    there, here = float(np.median(reported.itl)), float(np.median(ours.itl))
    figure = make_exact(abs(there / here - 1) * 100)
    note = f"{client} {there:.3f} ms, ours {here:.3f} ms; the mean gap of each request"
    lines.append(make_line(f"{client}: ITL p50, |client − ours|", "%", figure, Gate(SHARE), note=note))
    return lines


def _build_aiperf(served: Served, folder: Path, requests: int, concurrency: int) -> list[str]:
    server = f"--url {served.url.removeprefix('http://')} --endpoint-type chat --streaming --ui none"
    load = f"--concurrency {concurrency} --request-count {requests} --random-seed 1"
    shape = f"--synthetic-input-tokens-mean {PROMPT} --output-tokens-mean {OUTPUT}"
    paths = ["--model", str(served.model), "--tokenizer", str(served.model), "--artifact-dir", str(folder)]
    return ["profile", *paths, *f"{server} {load} {shape}".split()]


def _read_aiperf(folder: Path) -> Latencies:
    """Reads one JSON object per request."""
    exported = next(folder.rglob("profile_export.jsonl")).read_text().splitlines()
    requests = [json.loads(text)["metrics"] for text in exported]
    requests = [metrics for metrics in requests if "time_to_first_token" in metrics]

    def read_column(name: str) -> Any:
        return np.array([metrics[name]["value"] for metrics in requests if name in metrics], float)

    return Latencies(
        read_column("time_to_first_token"), read_column("request_latency"), read_column("inter_token_latency")
    )


def _build_guidellm(served: Served, folder: Path, requests: int, concurrency: int) -> list[str]:
    return [
        "run",
        *("--backend", f"kind=openai_http,target={served.url},model={served.model},max_tokens={OUTPUT}"),
        *("--profile", f"kind=concurrent,streams={concurrency}"),
        *("--constraint", f"kind=max_requests,count={requests}"),
        *("--tokenizer", f"kind=hf_auto,model={served.model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT}"),
        *("--output", f"kind=json,path={folder / 'out.json'}"),
        "--disable-progress",
    ]


def _read_guidellm(folder: Path) -> Latencies:
    """Reads the successful requests of the only benchmark. The duration is in s, other latencies in ms."""
    (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]

    def read_column(name: str, factor: float = 1.0) -> Any:
        return np.array([request[name] for request in requests], float) * factor

    return Latencies(
        read_column("time_to_first_token_ms"),
        read_column("request_latency", 1000.0),
        read_column("inter_token_latency_ms"),
    )


CLIENTS: dict[str, tuple[Callable[[Served, Path, int, int], list[str]], Callable[[Path], Latencies]]] = {
    "aiperf": (_build_aiperf, _read_aiperf),
    "guidellm": (_build_guidellm, _read_guidellm),
}
