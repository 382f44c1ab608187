"""A real vLLM server on the CPU: with our hooks, without them, and with other tracing.

    make bench-vllm

Clients measure the gaps between tokens and the tokens per second. Two equal servers differ by up to 12 % over their
lives. So our hooks are switched on and off in one server, in each of its processes (`whole.switched_server`). The
control is off against off.

Other tracing cannot be switched off, so each has a server of its own, beside two servers without tracing. All of them
run at once. Each has the load in turn while the others are stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
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
from benchmarks.whole.servers import VLLM_VARIABLES
from benchmarks.whole.switched_server import VARIABLES, SwitchedServer
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.demo.model import make_demo_model

STREAMS, TOKENS, PROMPT = 8, 48, 24
LAYERS, HIDDEN = 8, 768
"""A step takes about 20 ms on one core. With a smaller model the gaps depend on the HTTP server, not on the steps."""
ROUNDS, OTHERS_ROUNDS, QUICK_ROUNDS = 200, 20, 3
MAX_START_S = 240.0
MAX_HALF_WIDTH = 0.01
"""Largest half width of the bounds of the p50 ratio, for a verdict."""
GATE = Gate(2.0)
BARE, AGAIN, VLLM_TRACING, DDTRACE = (
    "uninstrumented",
    "uninstrumented, again",
    "vLLM's tracing",
    "ddtrace",
)
ENVIRON = {**VARIABLES, **VLLM_VARIABLES}
ON, OFF, CONTROL = "on", "off", "off, again"
SETTLE_S = 0.15
"""How long after a switch a round begins."""
NO_OTEL_INFER = {"VLLM_PLUGINS": "none", "OTEL_INFER_ENABLED": "off"}


class ClientTimes(NamedTuple):
    """Measured by the clients of one server in one round: gaps between tokens (ns), and tokens per second."""

    gaps: Any
    rate: float


class Serving:
    """A server that is stopped except for its turns."""

    def __init__(
        self, model: Path, log: Path, launcher: Sequence[str], environ: dict[str, str], *options: str
    ) -> None:
        self.port = find_free_port()
        command = [*launcher, *_build_command(model, str(self.port))]
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
        """Waits for the first successful response. Raises with the log if there is none."""
        deadline = time.monotonic() + MAX_START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.2)
        raise RuntimeError(
            f"a server was not ready in time:\n{self._log.read_text(errors='replace')[-4000:]}"
        )

    def send_signal(self, number: int) -> None:
        """Sends a signal to all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Ends all processes of the server."""
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self.send_signal(signal.SIGKILL)


def _build_command(model: Path, port: str) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32".split()
    return command + f"--max-model-len 512 --max-num-seqs {STREAMS} --enforce-eager".split()


# ── the clients ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _time_stream(port: int, text: str) -> list[int]:
    """Returns the arrival times of the tokens of one answer, ns."""
    request = {"model": "tiny", "prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    arrivals: list[int] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            arrivals.append(time.perf_counter_ns())
    writer.close()
    return arrivals


async def _run_load(port: int, number: int) -> ClientTimes:
    texts = [" ".join([f"w{number}{i}", *["time"] * PROMPT]) for i in range(STREAMS)]
    began = time.perf_counter_ns()
    streams = await asyncio.gather(*[_time_stream(port, text) for text in texts])
    lasted = time.perf_counter_ns() - began
    assert all(len(arrivals) > 0.9 * TOKENS for arrivals in streams), [
        len(arrivals) for arrivals in streams
    ]  # some tokens have no text
    return ClientTimes(
        np.concatenate([np.diff(arrivals) for arrivals in streams]), STREAMS * TOKENS / lasted * 1e9
    )


# ── the rounds ───────────────────────────────────────────────────────────────────────────────────────────────────


def measure(quick: bool) -> list[Line]:
    """Measures our hooks, then the other tracing."""
    with tempfile.TemporaryDirectory() as folder, Receiver() as receiver:
        model = make_demo_model(Path(folder) / "model", layers=LAYERS, hidden=HIDDEN)
        lines = _measure_switched(model, Path(folder), receiver, QUICK_ROUNDS if quick else ROUNDS)
        return lines + _measure_others(
            model, Path(folder), receiver, QUICK_ROUNDS if quick else OTHERS_ROUNDS
        )


def _measure_switched(model: Path, folder: Path, receiver: Receiver, rounds: int) -> list[Line]:
    """Compares on with off in one server, and checks that requests are recorded exactly while the hooks are on."""
    server = SwitchedServer(_build_command(model, "{port}"), folder / "switched", receiver.endpoint, ENVIRON)
    times: dict[str, list[ClientTimes]] = {ON: [], OFF: [], CONTROL: []}
    try:
        server.wait_until_ready()
        asyncio.run(_run_load(server.port, 0))
        time.sleep(3)
        receiver.read_counts()
        for number in range(1, rounds + 1):
            for state in (ON, OFF, CONTROL, ON) if number % 2 else (OFF, ON, ON, CONTROL):
                server.set_hooks(ON if state == ON else OFF)
                time.sleep(SETTLE_S)
                times[state].append(asyncio.run(_run_load(server.port, number)))
        time.sleep(3)
        recorded = receiver.read_counts()["names"].get("text_completion tiny", 0)
    finally:
        server.close()
    expected = len(times[ON]) * STREAMS
    hooked = [_join(*pair) for pair in zip(times[ON][::2], times[ON][1::2])]
    bare = [_join(*pair) for pair in zip(times[OFF], times[CONTROL])]
    lines = []
    for percent in (50, 99):
        figure = _compare_gaps(hooked, bare, percent)
        difference = _compare_gaps(times[CONTROL], times[OFF], percent)
        gate = GATE if percent == 50 else None
        control = _check_width(verdict.make_control(difference), figure, gate)
        claim = f"vLLM on a CPU, {STREAMS} streams: gap between tokens, p{percent}, otel_infer"
        lines.append(verdict.make_line(claim, "%", figure.scale_by(100), gate, control))
    rate = verdict.estimate_median([on.rate / off.rate - 1 for on, off in zip(hooked, bare)])
    lines.append(
        verdict.make_line(
            f"vLLM on a CPU, {STREAMS} streams: tokens per second, otel_infer", "%", rate.scale_by(100)
        )
    )
    typical = np.median(np.concatenate([round_times.gaps for round_times in bare])) / 1e6
    lines[0].note = f"{rounds} rounds in one server; the median gap without hooks is {typical:.2f} ms"
    missing = verdict.make_exact(float(abs(expected - recorded)))
    lines.append(
        verdict.make_line(
            "vLLM on a CPU: requests not recorded with hooks, or recorded without", "", missing, Gate(0)
        )
    )
    return lines


def _join(first: ClientTimes, second: ClientTimes) -> ClientTimes:
    return ClientTimes(np.concatenate([first.gaps, second.gaps]), (first.rate + second.rate) / 2)


def _compare_gaps(traced: Sequence[ClientTimes], bare: Sequence[ClientTimes], percent: float) -> Figure:
    """Returns a percentile over that of the bare server, minus 1, by round, because the machine's pace changes."""
    shares = [
        np.percentile(with_tracing.gaps, percent) / np.percentile(without.gaps, percent) - 1
        for with_tracing, without in zip(traced, bare)
    ]
    return verdict.estimate_median(shares)


def _measure_others(model: Path, folder: Path, receiver: Receiver, rounds: int) -> list[Line]:
    """Compares servers with other tracing to a server without tracing."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, Serving] = {}
        for name, launcher, environ, *options in _list_systems(receiver.endpoint):
            log = folder / f"{len(servers)}.log"
            servers[name] = Serving(model, log, launcher, environ, *options)
            stack.callback(servers[name].close)
            servers[name].wait_until_ready()
            asyncio.run(_run_load(servers[name].port, 0))  # warm-up
            servers[name].send_signal(signal.SIGSTOP)
        return make_lines(_measure_rounds(servers, rounds))


def _list_systems(endpoint: str) -> list[tuple[Any, ...]]:
    """Returns name, launcher, environment and options of each server."""
    systems: list[tuple[Any, ...]] = [
        (BARE, (), NO_OTEL_INFER),
        (AGAIN, (), NO_OTEL_INFER),
        (
            VLLM_TRACING,
            (),
            {**NO_OTEL_INFER, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "--otlp-traces-endpoint",
            f"{endpoint}/v1/traces",
        ),
    ]
    ddtrace = shutil.which("ddtrace-run", path=str(Path(sys.executable).parent / "ddtrace" / "bin"))
    if ddtrace:
        path = str(Path(sys.executable).parent / "ddtrace")
        environ = {
            **NO_OTEL_INFER,
            "PYTHONPATH": path,
            "DD_TRACE_AGENT_URL": endpoint,
            "DD_REMOTE_CONFIGURATION_ENABLED": "0",
        }
        systems.append((DDTRACE, (sys.executable, ddtrace), environ))
    return systems


def _measure_rounds(servers: dict[str, Serving], rounds: int) -> dict[str, list[ClientTimes]]:
    times: dict[str, list[ClientTimes]] = {name: [] for name in servers}
    for number in range(1, rounds + 1):
        names = list(servers)
        ordered = names[number % len(names) :] + names[: number % len(names)]
        for name in ordered if number % 2 else ordered[::-1]:
            servers[name].send_signal(signal.SIGCONT)
            times[name].append(asyncio.run(_run_load(servers[name].port, number)))
            servers[name].send_signal(signal.SIGSTOP)
    return times


def make_lines(times: dict[str, list[ClientTimes]]) -> list[Line]:
    """Returns how much slower each server is than one without tracing. The control is the other one without
    tracing."""
    lines = []
    for name in [name for name in times if name not in (BARE, AGAIN)]:
        for percent in (50, 99):
            figure = _compare_gaps(times[name], times[BARE], percent)
            control = verdict.make_control(_compare_gaps(times[AGAIN], times[BARE], percent))
            claim = f"vLLM on a CPU, {STREAMS} streams: gap between tokens, p{percent}, {name}, in a separate server"
            lines.append(verdict.make_line(claim, "%", figure.scale_by(100), None, control))
    return lines


def _check_width(control: Control, figure: Figure, gate: Gate | None) -> Control:
    """Returns a control that, for a gate, also requires narrow bounds."""
    width = (figure.high - figure.low) / 2
    if gate is None:
        return control
    return verdict.combine_controls(
        control, Control(f"bounds ± {100 * width:.2f} %", width <= MAX_HALF_WIDTH)
    )
