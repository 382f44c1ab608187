"""A real vLLM server on this machine's CPU, with us and without, and beside others that trace it.

    make bench-vllm

All servers are there at once; in turn each has the load, in an order that changes, while all the others are stopped (SIGSTOP).
What is compared is what the clients of a server see: the gaps between tokens, and tokens per second. Two of the servers
are uninstrumented: what differs between those is the control.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import verdict
from benchmarks.receiver import Receiver
from benchmarks.verdict import Control, Figure, Gate, Line
from otel_infer.cli.demo_model import make_demo_model

STREAMS, TOKENS, PROMPT = 8, 48, 24
LAYERS, HIDDEN = 8, 768
"""A step of it takes some 20 ms on one core: with a smaller one, clients see how fast the server answers, and not its steps."""
ROUNDS, QUICK_ROUNDS = 60, 3
READY_S = 240.0
HALF_WIDTH = 0.01
"""Of the p50 ratio's bounds: wider, and nothing is concluded."""
GATE = Gate(2.0)
BARE, AGAIN, OURS, THEIRS, DDTRACE = (
    "uninstrumented",
    "uninstrumented, again",
    "otel_infer",
    "vLLM's tracing",
    "ddtrace",
)
ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
WITHOUT_US = {"VLLM_PLUGINS": "nobody", "OTEL_INFER_ENABLED": "off"}


class Seen(NamedTuple):
    """By the clients of one server in one round: gaps between tokens in ns, and tokens per second."""

    gaps: Any
    rate: float


class Serving:
    """One server, stopped but for its turns."""

    def __init__(
        self, model: Path, log: Path, launcher: Sequence[str], environ: dict[str, str], *options: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [
            *launcher,
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
        ]
        command += f"--served-model-name tiny --host 127.0.0.1 --port {self.port} --dtype float32".split()
        command += f"--max-model-len 512 --max-num-seqs {STREAMS} --enforce-eager".split()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *options],
                stdout=output,
                stderr=output,
                env={**kept, **ENVIRON, **environ},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Returns when it answers; raises with what it said if it does not."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"a server did not get ready:\n{self._log.read_text(errors='replace')[-4000:]}")

    def signal(self, number: int) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends it, and everything that it started."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self.signal(signal.SIGKILL)


# ── the clients ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _stream(port: int, text: str) -> list[int]:
    """When each token of one answer came, ns."""
    asked = {"model": "tiny", "prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    at: list[int] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            at.append(time.perf_counter_ns())
    writer.close()
    return at


async def _load(port: int, number: int) -> Seen:
    texts = [" ".join([f"w{number}{i}", *["time"] * PROMPT]) for i in range(STREAMS)]
    began = time.perf_counter_ns()
    streams = await asyncio.gather(*[_stream(port, text) for text in texts])
    lasted = time.perf_counter_ns() - began
    assert all(len(at) > 0.9 * TOKENS for at in streams), [
        len(at) for at in streams
    ]  # some tokens are no text
    return Seen(np.concatenate([np.diff(at) for at in streams]), STREAMS * TOKENS / lasted * 1e9)


# ── the rounds ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure(quick: bool) -> list[Line]:
    """The lines of this section."""
    with tempfile.TemporaryDirectory() as folder, Receiver() as receiver, contextlib.ExitStack() as stack:
        model = make_demo_model(Path(folder) / "model", layers=LAYERS, hidden=HIDDEN)
        servers: dict[str, Serving] = {}
        for name, launcher, environ, *options in _systems(receiver.endpoint):
            log = Path(folder) / f"{len(servers)}.log"
            servers[name] = Serving(model, log, launcher, environ, *options)
            stack.callback(servers[name].close)
            servers[name].wait_until_ready()
            asyncio.run(_load(servers[name].port, 0))  # whatever it does for the first time
            servers[name].signal(signal.SIGSTOP)
        found = _rounds(servers, QUICK_ROUNDS if quick else ROUNDS)
    return lines_of(found)


def _systems(endpoint: str) -> list[tuple[Any, ...]]:
    """Name, launcher, environment and options of each."""
    export = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    systems: list[tuple[Any, ...]] = [
        (BARE, (), WITHOUT_US),
        (AGAIN, (), WITHOUT_US),
        (OURS, (sys.executable, "-m", "otel_infer", "run", "--"), export),
        (
            THEIRS,
            (),
            {**WITHOUT_US, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "--otlp-traces-endpoint",
            f"{endpoint}/v1/traces",
        ),
    ]
    ddtrace = shutil.which("ddtrace-run", path=str(Path(sys.executable).parent / "ddtrace" / "bin"))
    if ddtrace:
        path = str(Path(sys.executable).parent / "ddtrace")
        environ = {
            **WITHOUT_US,
            "PYTHONPATH": path,
            "DD_TRACE_AGENT_URL": endpoint,
            "DD_REMOTE_CONFIGURATION_ENABLED": "0",
        }
        systems.append((DDTRACE, (sys.executable, ddtrace), environ))
    return systems


def _rounds(servers: dict[str, Serving], rounds: int) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {name: [] for name in servers}
    for number in range(1, rounds + 1):
        names = list(servers)
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else turned[::-1]:
            servers[name].signal(signal.SIGCONT)
            found[name].append(asyncio.run(_load(servers[name].port, number)))
            servers[name].signal(signal.SIGSTOP)
    return found


def lines_of(found: dict[str, list[Seen]]) -> list[Line]:
    """A table of what each system adds to an uninstrumented server, in percent."""
    controls = {percent: _against_bare(found, AGAIN, percent) for percent in (50, 99)}
    lines = []
    for name in [name for name in found if name not in (BARE, AGAIN)]:
        for percent in (50, 99):
            figure = _against_bare(found, name, percent)
            gate = GATE if (name, percent) == (OURS, 50) else None
            control = verdict.against_itself(controls[percent])
            claim = f"vLLM on a CPU, {STREAMS} streams: gap between tokens, p{percent}, {name}"
            lines.append(verdict.line(claim, "%", figure.scaled(100), gate, _narrow(control, figure, gate)))
        rate = verdict.median([seen.rate / bare.rate - 1 for seen, bare in zip(found[name], found[BARE])])
        lines.append(
            verdict.line(
                f"vLLM on a CPU, {STREAMS} streams: tokens per second, {name}", "%", rate.scaled(100)
            )
        )
    typical = np.median(np.concatenate([seen.gaps for seen in found[BARE]])) / 1e6
    lines[0].note = f"{len(found[BARE])} rounds; uninstrumented, the median gap is {typical:.2f} ms"
    return lines


def _against_bare(found: dict[str, list[Seen]], name: str, percent: float) -> Figure:
    """A percentile over that of the uninstrumented server, minus 1: round by round, since the machine's pace changes."""
    shares = [
        np.percentile(seen.gaps, percent) / np.percentile(bare.gaps, percent) - 1
        for seen, bare in zip(found[name], found[BARE])
    ]
    return verdict.median(shares)


def _narrow(control: Control, figure: Figure, gate: Gate | None) -> Control:
    """With a gate, bounds that are too wide say nothing."""
    width = (figure.high - figure.low) / 2
    if gate is None:
        return control
    return verdict.all_of(control, Control(f"bounds ± {100 * width:.2f} %", width <= HALF_WIDTH))
