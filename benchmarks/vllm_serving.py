"""A real vLLM server on this machine's CPU, with us and without, and beside others that trace it.

    make bench-vllm

What is compared is what the clients of a server see: the gaps between tokens, and tokens per second. Two servers of the same
kind differ by up to 12 % here for as long as they live, so our hooks are taken off and put on again in one and the same
server (a plugin of ours does it at a signal, in each of its processes), in rounds of on, off, off, on; the control is what
differs between the two that are off. The others cannot be switched: each has a server of its own, all are there at once, and
in turn each has the load while the rest is stopped (SIGSTOP). Two of those are uninstrumented: what differs between
them is what servers differ by.
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
from otel_infer.cli.demo.model import make_demo_model

STREAMS, TOKENS, PROMPT = 8, 48, 24
LAYERS, HIDDEN = 8, 768
"""A step of it takes some 20 ms on one core: with a smaller one, clients see how fast the server answers, and not its steps."""
ROUNDS, OTHERS_ROUNDS, QUICK_ROUNDS = 200, 20, 3
READY_S = 240.0
HALF_WIDTH = 0.01
"""Of the p50 ratio's bounds: wider, and nothing is concluded."""
GATE = Gate(2.0)
BARE, AGAIN, THEIRS, DDTRACE = (
    "uninstrumented",
    "uninstrumented, again",
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
ON, OFF, CONTROL = "on", "off", "off, again"
SETTLES_S = 0.15
PLUGIN = """
import os, pathlib, signal

def listen():
    from otel_infer._bootstrap.install import installation
    def switch(number, frame):
        for integration in installation.installed:
            integration.install() if number == signal.SIGUSR1 else integration.remove()
    signal.signal(signal.SIGUSR1, switch)
    signal.signal(signal.SIGUSR2, switch)
    pathlib.Path(__file__).with_name(f"{os.getpid()}.pid").touch()
"""
"""Puts our hooks on and takes them off again; says which processes listen, since a signal ends any other."""
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
    with tempfile.TemporaryDirectory() as folder, Receiver() as receiver:
        model = make_demo_model(Path(folder) / "model", layers=LAYERS, hidden=HIDDEN)
        lines = _switched(model, Path(folder), receiver, QUICK_ROUNDS if quick else ROUNDS)
        return lines + _others(model, Path(folder), receiver, QUICK_ROUNDS if quick else OTHERS_ROUNDS)


def _switched(model: Path, folder: Path, receiver: Receiver, rounds: int) -> list[Line]:
    """Our hooks on and off in one server; and whether they were."""
    plugin = folder / "plugin"
    (plugin / "switch-0.dist-info").mkdir(parents=True)
    (plugin / "switch.py").write_text(PLUGIN)
    (plugin / "switch-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: switch\nVersion: 0\n"
    )
    (plugin / "switch-0.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nswitch = switch:listen\n"
    )
    environ = {**_export(receiver.endpoint), "PYTHONPATH": str(plugin)}
    run = (sys.executable, "-m", "otel_infer", "run", "--")
    server = Serving(model, folder / "switched.log", run, environ)
    found: dict[str, list[Seen]] = {ON: [], OFF: [], CONTROL: []}
    try:
        server.wait_until_ready()
        asyncio.run(_load(server.port, 0))
        time.sleep(3)
        receiver.counted()
        for number in range(1, rounds + 1):
            for state in (ON, OFF, CONTROL, ON) if number % 2 else (OFF, ON, ON, CONTROL):
                for listening in plugin.glob("*.pid"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(listening.stem), signal.SIGUSR1 if state == ON else signal.SIGUSR2)
                time.sleep(SETTLES_S)
                found[state].append(asyncio.run(_load(server.port, number)))
        time.sleep(3)
        told = receiver.counted()["names"].get("text_completion tiny", 0)
    finally:
        server.close()
    asked = len(found[ON]) * STREAMS
    halves = {ON: [_both(*pair) for pair in zip(found[ON][::2], found[ON][1::2])]}
    bare = [_both(*pair) for pair in zip(found[OFF], found[CONTROL])]
    lines = []
    for percent in (50, 99):
        figure = _against(halves[ON], bare, percent)
        itself = _against(found[CONTROL], found[OFF], percent)
        gate = GATE if percent == 50 else None
        control = _narrow(verdict.against_itself(itself), figure, gate)
        claim = f"vLLM on a CPU, {STREAMS} streams: gap between tokens, p{percent}, otel_infer"
        lines.append(verdict.line(claim, "%", figure.scaled(100), gate, control))
    rate = verdict.median([seen.rate / off.rate - 1 for seen, off in zip(halves[ON], bare)])
    lines.append(
        verdict.line(
            f"vLLM on a CPU, {STREAMS} streams: tokens per second, otel_infer", "%", rate.scaled(100)
        )
    )
    typical = np.median(np.concatenate([seen.gaps for seen in bare])) / 1e6
    lines[0].note = f"{rounds} rounds in one server; off, the median gap is {typical:.2f} ms"
    missing = verdict.exactly(float(abs(asked - told)))
    lines.append(
        verdict.line("vLLM on a CPU: requests not told while on, or told while off", "", missing, Gate(0))
    )
    return lines


def _both(one: Seen, other: Seen) -> Seen:
    return Seen(np.concatenate([one.gaps, other.gaps]), (one.rate + other.rate) / 2)


def _against(seen: Sequence[Seen], bare: Sequence[Seen], percent: float) -> Figure:
    """A percentile over that of the other, minus 1: round by round, since the machine's pace changes."""
    shares = [
        np.percentile(it.gaps, percent) / np.percentile(other.gaps, percent) - 1
        for it, other in zip(seen, bare)
    ]
    return verdict.median(shares)


def _others(model: Path, folder: Path, receiver: Receiver, rounds: int) -> list[Line]:
    """Servers that somebody else traces, and two that nobody does."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, Serving] = {}
        for name, launcher, environ, *options in _systems(receiver.endpoint):
            log = folder / f"{len(servers)}.log"
            servers[name] = Serving(model, log, launcher, environ, *options)
            stack.callback(servers[name].close)
            servers[name].wait_until_ready()
            asyncio.run(_load(servers[name].port, 0))  # whatever it does for the first time
            servers[name].signal(signal.SIGSTOP)
        return lines_of(_rounds(servers, rounds))


def _export(endpoint: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


def _systems(endpoint: str) -> list[tuple[Any, ...]]:
    """Name, launcher, environment and options of each."""
    systems: list[tuple[Any, ...]] = [
        (BARE, (), WITHOUT_US),
        (AGAIN, (), WITHOUT_US),
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
    """What each of these servers is slower by than an uninstrumented one, in percent, which another such is the control of."""
    lines = []
    for name in [name for name in found if name not in (BARE, AGAIN)]:
        for percent in (50, 99):
            figure = _against(found[name], found[BARE], percent)
            control = verdict.against_itself(_against(found[AGAIN], found[BARE], percent))
            claim = f"vLLM on a CPU, {STREAMS} streams: gap between tokens, p{percent}, {name}, in a server of its own"
            lines.append(verdict.line(claim, "%", figure.scaled(100), None, control))
    return lines


def _narrow(control: Control, figure: Figure, gate: Gate | None) -> Control:
    """With a gate, bounds that are too wide say nothing."""
    width = (figure.high - figure.low) / 2
    if gate is None:
        return control
    return verdict.all_of(control, Control(f"bounds ± {100 * width:.2f} %", width <= HALF_WIDTH))
