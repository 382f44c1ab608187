"""The part `whole` of `gpu_verify`: the cost of hooks and marks to `transformers serve` with CUDA graphs on a GPU.

    make the model ─ start one server ─ check the set-up ─ 1, 32, 128 streams: rounds of blocks in each state

All of it fits into one command of ten minutes. Rows are saved after each round, so they remain if the command is stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import verdict
from benchmarks.verdict import Control, Line
from benchmarks.whole import lines, measurement, servers
from benchmarks.whole.lines import Loss
from benchmarks.whole.load import Block, Load
from benchmarks.whole.measurement import ServerResult
from benchmarks.whole.servers import ServedLoad
from benchmarks.whole.switched_server import OFF, ON, UNMARKED, SwitchedServer
from otel_infer.cli.demo.model import make_demo_model

ON_GPU = "--device cuda --dtype bfloat16 --cb-use-cuda-graph --cb-num-blocks 512 --cb-max-batch-tokens 512"
LOSSES = (
    Loss("rate", "{unit}s/s lost", 1.0, is_more_worse=False),
    Loss("gap_p50", "gap between tokens, p50", 1.0),
    Loss("gap_p99", "gap between tokens, p99", 1.0),
    Loss("first_p99", "{first}, p99", None),
)
"""The gates are for the upper bounds."""
COMPARED = {ON: "hooks and marks", UNMARKED: "hooks without marks"}


class ServedModel(NamedTuple):
    """The model and how it is served. `options`: of the command line. `tokens`: the mean of a request."""

    layers: int
    hidden: int
    options: str
    tokens: int
    is_on_gpu: bool

    def serve_streams(self, number: int) -> ServedLoad:
        """Returns the server with so many streams."""
        where = " on a GPU" if self.is_on_gpu else ""
        return servers.serve_transformers(number, where, self.options, self.tokens)


class StreamLoad(NamedTuple):
    """A number of streams, and the states that are compared under it."""

    streams: int
    states: tuple[str, ...]


class TimePlan(NamedTuple):
    """How long each part takes, s. `all_s` begins with the start of the server, and a load may take `load_s` of it."""

    warm_up_s: float
    block_s: float
    max_settle_s: float
    load_s: float
    all_s: float

    def share_time(self, passed_s: float, loads_left: int) -> float:
        """Returns how long the rounds of the next load may take, s; 0 if no time is left."""
        return max(min(self.load_s, (self.all_s - passed_s) / loads_left), 0.0)


BILLION = ServedModel(26, 2048, ON_GPU, 64, True)
"""0.99 billion parameters, served in bfloat16."""
LOADS = (StreamLoad(1, (ON, OFF)), StreamLoad(32, (ON, UNMARKED, OFF)), StreamLoad(128, (ON, OFF)))
PLAN = TimePlan(5.0, 2.0, 3.0, 140.0, 470.0)
"""With the model (25 s) and the end of the server, 530 s at most."""


def measure(
    folder: Path,
    save: Callable[[list[Line]], None],
    served_model: ServedModel = BILLION,
    loads: Sequence[StreamLoad] = LOADS,
    plan: TimePlan = PLAN,
) -> list[Line]:
    """Returns the rows of all loads. `folder` gets the rounds of each load; `save` gets all rows after each round."""
    rows: list[Line] = []
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_demo_model(temporary / "model", layers=served_model.layers, hidden=served_model.hidden)
        first = served_model.serve_streams(loads[0].streams)
        began = time.monotonic()
        server, files = stack.enter_context(measurement.start_server(first, model))
        for number, load in enumerate(loads):
            served, measured = served_model.serve_streams(load.streams), list[Line]()
            with measurement.run_load(served, model, server, files) as clients:
                warm = measurement.warm_up(served, server, clients, plan.warm_up_s)
                if not number:
                    check_setup(server, served_model.is_on_gpu)
                seconds = plan.share_time(time.monotonic() - began, len(loads) - number)
                for result in measure_rounds(served, server, clients, load.states, plan, warm, seconds):
                    result.save(folder / f"{served.name}.json")
                    measured = make_lines(served, result, load.states)
                    save(rows + measured)
            print_rows(measured)
            rows += measured
    return rows


def measure_rounds(
    served: ServedLoad,
    server: SwitchedServer,
    clients: Load,
    states: Sequence[str],
    plan: TimePlan,
    warm: Block,
    seconds: float,
) -> Iterator[ServerResult]:
    """Yields the result after each round, until the time is over."""
    result = ServerResult("")
    settle_s = min(measurement.choose_settle_time(warm), plan.max_settle_s)
    while has_time(result, seconds):
        measurement.measure_round(served, server, clients, result, settle_s, plan.block_s, states)
        yield result


def has_time(result: ServerResult, seconds: float) -> bool:
    """Returns whether one more round ends in time, if it takes as long as those before. The first one needs any time."""
    rounds = len(result.rounds)
    return result.rounds_s * (rounds + 1) / rounds <= seconds if rounds else seconds > 0


def check_setup(server: SwitchedServer, is_on_gpu: bool) -> None:
    """Switches to each state once. Raises RuntimeError if a process does not obey, or if a GPU has no marks or no CUDA
    graphs. Then nothing else is measured."""
    began = time.monotonic()
    for state in (OFF, UNMARKED, ON):
        server.set_hooks(state)
    switched = f"{len(server.acknowledged)} processes switched in {time.monotonic() - began:.1f} s"
    counts = f"{server.marked_steps} steps marked, {server.captured_graphs} graphs captured"
    print(f"set-up: {switched}, {counts}", file=sys.stderr, flush=True)
    if is_on_gpu and not (server.marked_steps and server.captured_graphs):
        raise RuntimeError(f"the set-up is not as wanted: {counts}\n{server.read_log()}")


def make_lines(served: ServedLoad, result: ServerResult, states: Sequence[str]) -> list[Line]:
    """Returns the rows of a load. Hooks with marks have gates; hooks without marks are for information."""
    rows: list[Line] = []
    control = lines.check_requests(result) or check_marks(result)
    for state in [state for state in states if state != OFF and result.rounds]:
        named = dataclasses.replace(served, title=f"{served.title}, {COMPARED[state]}")
        losses = LOSSES if state == ON else [loss._replace(gate=None) for loss in LOSSES]
        rows += [
            verdict.make_line(loss.claim, loss.unit, loss.figure, loss.gate, control, loss.note)
            for loss in lines.estimate_losses(named, result, state, losses)
        ]
    return rows


def check_marks(result: ServerResult) -> Control:
    """Returns the number of steps that were marked. The control holds if there were any."""
    marked = sum(round_[ON]["marked"] for round_ in result.rounds)
    return Control(f"{marked:.0f} steps marked", marked > 0)


def print_rows(rows: Sequence[Line]) -> None:
    """Prints rows while later loads are measured."""
    for claim, _, measured, bounds, control, judged in verdict.format_rows(rows):
        print(f"  {claim}: {measured} {bounds} {control} {judged}", file=sys.stderr, flush=True)
