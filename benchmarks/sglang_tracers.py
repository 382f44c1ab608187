"""What tracing costs SGLang's scheduler per step: our hooks beside its own tracer, at level 3 with its own exporter.

    .venv-sglang/bin/python -m benchmarks --only sglang_tracers

The pass over the model is replaced by constant scores, so that a step is the scheduler's work. Three servers run, with our
hooks, with SGLang's tracer, and without tracing. Each has the same requests in turn while the others are stopped (SIGSTOP).
The figure is the CPU time of the scheduler's process, with all its threads, so SGLang's exporting thread is in it; the second
one is that of all processes, so our sidecar is in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine, sglang_on_cpu
from benchmarks.battery.load import Load, TimedRequest
from benchmarks.grpc_receiver import GrpcReceiver
from benchmarks.receiver import Receiver
from benchmarks.verdict import Gate, Line, estimate_median, make_line
from benchmarks.whole.switched_server import VARIABLES, list_descendants, read_command
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.demo.model import make_demo_model

SIZES, TOKENS, WORDS = (8, 64, 256), 200, 12
ROUNDS, QUICK_ROUNDS = 8, 1
START_S, SETTLE_S, EXPORT_S = 240.0, 0.3, 1.5
SERVER_SIZES = "--max-total-tokens 131072 --context-length 4096 --max-running-requests 256"
OURS, OWN, BARE = "our hooks", "SGLang's tracer", "no tracing"
SCHEDULER = "sglang::scheduler"
FIELDS = {"ignore_eos": True}


class CpuTime(NamedTuple):
    """CPU time of a step, ns: of the scheduler's process, and of all processes of the server."""

    scheduler: float
    everything: float


class TracedServer:
    """A server that is stopped except for its turns. `launcher`: before the command; `options`: after it."""

    def __init__(
        self, model: Path, log: Path, launcher: Sequence[str], environ: dict[str, str], *options: str
    ) -> None:
        self.port, self._log = find_free_port(), log
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        replaced = {**sglang_on_cpu.VARIABLES, "SGLANG_WITHOUT_MODEL": "1"}
        values = {"{model}": str(model), "{port}": str(self.port)}
        started = [values.get(part, part) for part in sglang_on_cpu.make_command(SERVER_SIZES)]
        command = [*launcher, *started, *options]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True,
                env={**kept, **VARIABLES, **replaced, **environ},
            )  # fmt: skip
        url = f"http://127.0.0.1:{self.port}"
        if not wait_until_healthy(url, lambda: self._process.poll() is None, START_S):
            raise RuntimeError(f"SGLang was not ready in time:\n{self._read_log()}")
        processes = self._list_processes()
        self._scheduler = next(pid for pid in processes if SCHEDULER in read_command(pid))

    def take_turn(self, size: int) -> CpuTime:
        """Returns what a step with so many requests running takes. Raises RuntimeError if one is refused."""
        self.send_signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        before = self._read_cpu()
        requests = [TimedRequest(0.0, WORDS, TOKENS)] * size
        answers = Load(self.port, "chat", "tiny", requests, FIELDS).run()
        after = self._read_cpu()
        time.sleep(EXPORT_S)
        self.send_signal(signal.SIGSTOP)
        refused = {answer.status for answer in answers} - {200}
        if refused:
            raise RuntimeError(f"SGLang answers {refused}:\n{self._read_log()}")
        return CpuTime(*((end - begin) / TOKENS for begin, end in zip(before, after)))

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _read_cpu(self) -> CpuTime:
        everything = sum(machine.read_cpu_ns(pid) for pid in self._list_processes())
        return CpuTime(machine.read_cpu_ns(self._scheduler), everything)

    def _list_processes(self) -> list[int]:
        return [self._process.pid, *list_descendants(self._process.pid)]

    def send_signal(self, number: int) -> None:
        """Sends a signal to all processes of the server."""
        for pid in self._list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Ends all processes of the server."""
        self.send_signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.send_signal(signal.SIGKILL)
        self._process.wait()


def measure(quick: bool) -> list[Line]:
    """Returns the rows of each size."""
    taken: dict[int, list[dict[str, CpuTime]]] = {size: [] for size in SIZES}
    rng = random.Random(1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        receiver, own_receiver = stack.enter_context(Receiver()), stack.enter_context(GrpcReceiver())
        servers = _start_servers(stack, folder, receiver.endpoint, own_receiver.endpoint)
        for server in servers.values():
            server.take_turn(SIZES[-1])  # warm
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            for size in rng.sample(SIZES, len(SIZES)):
                order = rng.sample(list(servers), len(servers))
                times = {name: servers[name].take_turn(size) for name in order}
                taken[size].append(times)
            print(f"round {number + 1}: {taken[SIZES[-1]][-1]}", file=sys.stderr, flush=True)
        counts = receiver.read_counts()
        note = f"{counts['spans']:,} spans of ours arrived, {own_receiver.count_spans():,} of SGLang's"
    return [line for size in SIZES for line in _make_lines(size, taken[size], note)]


def _start_servers(
    stack: contextlib.ExitStack, folder: Path, endpoint: str, own_endpoint: str
) -> dict[str, TracedServer]:
    """Returns the servers, each stopped, which are ended with the stack."""
    model = make_demo_model(folder / "tiny", layers=1, hidden=64)
    output = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    own_options = ("--enable-trace", "--otlp-traces-endpoint", own_endpoint.removeprefix("http://"))
    kinds: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]] = {
        OURS: ((sys.executable, "-m", "otel_infer", "run", "--"), output, ()),
        OWN: ((), {"OTEL_INFER_ENABLED": "off"}, own_options),
        BARE: ((), {"OTEL_INFER_ENABLED": "off"}, ()),
    }
    servers: dict[str, TracedServer] = {}
    for name, (launcher, environ, options) in kinds.items():
        server = TracedServer(model, folder / f"{len(servers)}.log", launcher, environ, *options)
        stack.callback(server.close)
        server.send_signal(signal.SIGSTOP)
        servers[name] = server
    return servers


def _make_lines(size: int, rounds: list[dict[str, CpuTime]], note: str) -> list[Line]:
    lines = []
    for what, column in (("the scheduler's process", 0), ("all processes", 1)):
        title = f"SGLang, {size} running, CPU of {what}"
        bare = estimate_median([times[BARE][column] / 1000 for times in rounds]).value
        for name in (OURS, OWN):
            added = [(times[name][column] - times[BARE][column]) / 1000 for times in rounds]
            described = f"a step takes {bare:.0f} µs without tracing; {note}"
            lines.append(make_line(f"{title}: {name}, a step", "µs", estimate_median(added), note=described))
        shares = [
            (times[OURS][column] - times[BARE][column]) / (times[OWN][column] - times[BARE][column])
            for times in rounds
        ]
        gate = Gate(1.0) if column == 0 else None
        claim = f"{title}: our hooks, as a share of SGLang's tracer"
        lines.append(make_line(claim, "", estimate_median(shares), gate))
    return lines
