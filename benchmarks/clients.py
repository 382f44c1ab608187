"""GuideLLM and AIPerf as the client: neither sends a `traceparent`, so distributions are compared, percentile by percentile.

python -m benchmarks.truth --client aiperf        # `aiperf` or `guidellm` on the PATH, or AIPERF= / GUIDELLM=PATH
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
from benchmarks.verdict import Gate, Line, exactly, line
from otel_infer.assembly.records.request import RequestRecord

PROMPT, OUTPUT = 64, 48
PERCENTILES = (50, 95)
LIMIT_S = 900
MEDIAN_MS, P95_MS, SHARE = 5.0, 15.0, 5.0


class Seen(NamedTuple):
    """What a client says it saw: per request, ms."""

    ttft: Any
    e2e: Any
    itl: Any


def compared(client: str, requests: int, concurrency: int) -> list[Line]:
    """One run of this client against a server of ours."""
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
        ran = subprocess.run(
            arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        if ran.returncode != 0:
            raise SystemExit(
                f"{client} ended with {ran.returncode}:\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}"
            )
        seen = read(folder)
    ours = [one for one in served.records() if one.arrived_at > began and one.output_tokens > 1]
    served.remove()
    return _lines(client, seen, ours)


def _lines(client: str, seen: Seen, records: list[RequestRecord]) -> list[Line]:
    """Of tools that count their own warm-up or leave it out, the numbers of requests may differ by some."""
    # A tool's warm-up comes first and is not among what it reports.
    records = sorted(records, key=lambda one: one.arrived_at)[-len(seen.ttft) :]
    ours = Seen(
        np.array([one.ttft_ns for one in records]) / 1e6,
        np.array([one.duration_ns for one in records]) / 1e6,
        np.array([one.gaps_ns().mean() for one in records if one.steps is not None]) / 1e6,
    )
    found = []
    for name, theirs, mine in zip(("TTFT", "E2E"), seen, ours):
        for percent in PERCENTILES:
            there, here = np.percentile(theirs, percent), np.percentile(mine, percent)
            note = f"{client} {there:.2f} ms over {len(theirs)}, ours {here:.2f} ms over {len(mine)}"
            limit = MEDIAN_MS if percent == 50 else max(P95_MS, there * SHARE / 100)
            figure = exactly(float(there - here))
            found.append(
                line(f"{client}: {name} p{percent}, client − ours", "ms", figure, Gate(limit), note=note)
            )
    there, here = float(np.median(seen.itl)), float(np.median(ours.itl))
    figure = exactly(abs(there / here - 1) * 100)
    note = f"{client} {there:.3f} ms, ours {here:.3f} ms; the mean gap of each request, which both can tell"
    found.append(line(f"{client}: ITL p50, |client − ours|", "%", figure, Gate(SHARE), note=note))
    return found


def _aiperf(served: Served, folder: Path, requests: int, concurrency: int) -> list[str]:
    where = f"--url {served.url.removeprefix('http://')} --endpoint-type chat --streaming --ui none"
    load = f"--concurrency {concurrency} --request-count {requests} --random-seed 1"
    shape = f"--synthetic-input-tokens-mean {PROMPT} --output-tokens-mean {OUTPUT}"
    paths = ["--model", str(served.model), "--tokenizer", str(served.model), "--artifact-dir", str(folder)]
    return ["profile", *paths, *f"{where} {load} {shape}".split()]


def _read_aiperf(folder: Path) -> Seen:
    """One JSON object per request."""
    lines = next(folder.rglob("profile_export.jsonl")).read_text().splitlines()
    metrics = [json.loads(text)["metrics"] for text in lines]
    metrics = [one for one in metrics if "time_to_first_token" in one]

    def column(name: str) -> Any:
        return np.array([one[name]["value"] for one in metrics if name in one], float)

    return Seen(column("time_to_first_token"), column("request_latency"), column("inter_token_latency"))


def _guidellm(served: Served, folder: Path, requests: int, concurrency: int) -> list[str]:
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


def _read_guidellm(folder: Path) -> Seen:
    """The successful requests of its only benchmark; latencies in ms, but the whole in s."""
    (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]

    def column(name: str, factor: float = 1.0) -> Any:
        return np.array([one[name] for one in requests], float) * factor

    return Seen(
        column("time_to_first_token_ms"), column("request_latency", 1000.0), column("inter_token_latency_ms")
    )


CLIENTS: dict[str, tuple[Callable[[Served, Path, int, int], list[str]], Callable[[Path], Seen]]] = {
    "aiperf": (_aiperf, _read_aiperf),
    "guidellm": (_guidellm, _read_guidellm),
}
