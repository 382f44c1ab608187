"""Measures one server: the sidecar's share, who holds the GIL, and rounds of blocks with and without hooks.

The results are saved after each part and each round, so an interrupted run goes on where it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.receiver import Receiver
from benchmarks.whole import gil_samples
from benchmarks.whole.load import Block, Load
from benchmarks.whole.servers import ServedLoad
from benchmarks.whole.switched_server import OFF, ON, SwitchedServer

TOP_PLACES = 15


class Plan(NamedTuple):
    """How long each part takes, s."""

    warm_up_s: float
    block_s: float
    min_rounds: int
    rounds_s: float
    sidecar_windows: int
    sidecar_window_s: float
    samples: int
    samples_s: float
    running_samples_s: float


RUNNING_RATE = 250
FULL = Plan(10.0, 3.0, 16, 900.0, 6, 10.0, gil_samples.SAMPLES, 600.0, 60.0)
QUICK = Plan(3.0, 1.0, 1, 0.0, 2, 2.0, 100, 5.0, 3.0)
MAX_SETTLE_S, MIN_SETTLE_S, MAX_BACKLOG_S = 8.0, 0.5, 60.0


@dataclass
class ServerResult:
    """The measurements of one server. A round has the figures of each state."""

    source: str
    sidecar: list[float] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    running_samples: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    rounds_s: float = 0.0
    is_complete: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the result; a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        os.replace(temporary, path)


def load_result(path: Path, source: str) -> ServerResult:
    """Returns the saved result; an empty one if there is none, or if it was measured with other source code."""
    try:
        saved = ServerResult(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return ServerResult(source)
    return saved if saved.source == source else ServerResult(source)


def measure_server(
    served: ServedLoad,
    model: Path,
    result: ServerResult,
    path: Path,
    plan: Plan,
    is_conclusive: Callable[[ServerResult], bool],
) -> None:
    """Measures the parts that the result lacks."""
    if result.is_complete:
        return
    result.environment = machine.describe_machine()
    if not (result.sidecar and result.samples):
        with start_server(served, model) as (server, folder), run_load(served, model, server, folder) as load:
            warm_up(served, server, load, plan.warm_up_s)
            result.sidecar = result.sidecar or measure_sidecar(server, plan)
            result.save(path)
            sample_server(server, folder, served.sample_rate, plan, result)
            result.save(path)
    # The stops of the samples leave a backlog, in which a worker of gunicorn is replaced. So the rounds have a server of their own.
    with start_server(served, model) as (server, folder), run_load(served, model, server, folder) as load:
        warm = warm_up(served, server, load, plan.warm_up_s)
        settle_s = choose_settle_time(warm)
        block_s = max(plan.block_s, settle_s) if plan is FULL else plan.block_s
        while not _is_done(result, plan, is_conclusive):
            measure_round(served, server, load, result, settle_s, block_s)
            result.save(path)
        result.is_complete = True
        result.save(path)


@contextlib.contextmanager
def start_server(served: ServedLoad, model: Path) -> Iterator[tuple[SwitchedServer, Path]]:
    """Starts the server. Yields it, and a folder for temporary files."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        receiver = stack.enter_context(Receiver())
        command = [part.replace("{model}", str(model)) for part in served.command]
        variables = {name: text.replace("{model}", str(model)) for name, text in served.variables.items()}
        server = SwitchedServer(command, folder, receiver.endpoint, variables)
        stack.callback(server.close)
        server.wait_until_ready(served.health)
        yield server, folder


@contextlib.contextmanager
def run_load(served: ServedLoad, model: Path, server: SwitchedServer, folder: Path) -> Iterator[Load]:
    """Runs the clients of a server."""
    options = json.loads(json.dumps(served.options).replace("{model}", str(model)))
    with contextlib.closing(Load(server, served.kind, served.number, options, folder)) as load:
        yield load


def warm_up(served: ServedLoad, server: SwitchedServer, load: Load, seconds: float) -> Block:
    """Returns a block with hooks installed, so long after the first answers. Raises RuntimeError if a request failed or
    none was answered."""
    until = time.monotonic() + MAX_BACKLOG_S
    while not load.measure_block(1.0).units and time.monotonic() < until:
        pass
    time.sleep(seconds)
    warm = load.measure_block(seconds)
    if not warm.units or warm.errors:
        raise RuntimeError(f"{server.read_log()}\n{served.name}: {warm.units} units, {warm.errors} errors")
    return warm


def choose_settle_time(warm: Block) -> float:
    """Returns how long after a switch until requests from before it have ended, s."""
    longest = float(np.percentile(warm.lengths, 95)) if len(warm.lengths) else 0.0
    return min(max(longest, MIN_SETTLE_S), MAX_SETTLE_S)


def _is_done(result: ServerResult, plan: Plan, is_conclusive: Callable[[ServerResult], bool]) -> bool:
    if len(result.rounds) < plan.min_rounds:
        return False
    return result.rounds_s > plan.rounds_s or is_conclusive(result)


def measure_round(
    served: ServedLoad,
    server: SwitchedServer,
    load: Load,
    result: ServerResult,
    settle_s: float,
    block_s: float,
    states: Sequence[str] = (ON, OFF),
) -> None:
    """Measures each state twice, and adds the figures of each to the result."""
    began, number = time.monotonic(), len(result.rounds)
    blocks: dict[str, list[Block]] = {state: [] for state in states}
    marked: list[int] = []
    for state in order_states(states, number):
        server.set_hooks(state)
        marked.append(server.marked_steps)
        time.sleep(settle_s)
        blocks[state].append(load.measure_block(block_s))
    server.set_hooks(ON)
    result.rounds.append(
        {state: summarize_block(first.join(last)) for state, (first, last) in blocks.items()}
    )
    result.rounds[-1][ON]["marked"] = float(server.marked_steps - marked[0])
    result.rounds_s += time.monotonic() - began
    rates = ", ".join(f"{figures['rate']:.1f} {state}" for state, figures in result.rounds[-1].items())
    print(f"{served.name}: round {number + 1}: {served.unit}s/s {rates}", file=sys.stderr, flush=True)


def order_states(states: Sequence[str], number: int) -> list[str]:
    """Returns the order of a round: on, off, off, on; in the next round off, on, on, off. So a steady drift counts for
    no state, and each of several states is the first one in turn."""
    first = number % len(states)
    turned = [*states[first:], *states[:first]]
    return turned + turned[::-1]


def summarize_block(block: Block) -> dict[str, float]:
    """Returns the rate (1/s), the CPU time of a unit (s), and percentiles of gaps and of times to the first (s)."""
    figures = {
        "rate": block.units / block.seconds,
        "cpu": block.cpu / max(block.units, 1),
        "errors": float(block.errors),
    }
    for name, column, percents in (("gap", block.gaps, (50, 99)), ("first", block.firsts, (50, 99))):
        for percent in percents:
            figures[f"{name}_p{percent}"] = (
                float(np.percentile(column, percent)) if len(column) else float("nan")
            )
    return figures


def measure_sidecar(server: SwitchedServer, plan: Plan) -> list[float]:
    """Returns the CPU time of the sidecar with hooks installed, as a share of one core, by window."""
    server.set_hooks(ON)
    pid = server.find_sidecar()
    if pid is None:
        raise RuntimeError(f"the sidecar does not run\n{server.read_log()}")
    shares = []
    for _ in range(plan.sidecar_windows):
        began, cpu = time.perf_counter(), machine.read_cpu_ns(pid)
        time.sleep(plan.sidecar_window_s)
        shares.append((machine.read_cpu_ns(pid) - cpu) / 1e9 / (time.perf_counter() - began))
    return shares


def sample_server(server: SwitchedServer, folder: Path, rate: int, plan: Plan, result: ServerResult) -> None:
    """Samples the server with hooks installed, without stops and then with native frames."""
    server.set_hooks(ON)
    pid = server.find_main_process()
    running = (RUNNING_RATE, plan.samples, plan.running_samples_s, gil_samples.NONBLOCKING)
    result.running_samples = describe_shares(*gil_samples.record_samples(pid, folder, *running))
    stopped = (rate, plan.samples, plan.samples_s)
    result.samples = describe_shares(*gil_samples.record_samples(pid, folder, *stopped))


def describe_shares(shares: gil_samples.GilShares, missing: str) -> dict[str, Any]:
    """Returns the counts of samples: all, ours, ours by hook and by function, and by process."""
    return {
        "total": shares.total,
        "ours": shares.hooks.total(),
        "hooks": dict(shares.hooks.most_common(TOP_PLACES)),
        "functions": dict(shares.functions.most_common(TOP_PLACES)),
        "processes": shares.processes,
        "missing": missing,
    }
