"""The decode loop of the simulated engine: 256 running, every step of every request exported as a span."""

from __future__ import annotations

import os

from benchmarks import machine
from benchmarks.blocks import Rounds, alternating, lines_of, run_steps
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Line, lost_line

LOOP = "simulated loop, 256 running"


def measure(quick: bool) -> list[Line]:
    """Ours first, then the stock SDK on the same engine to the same receiver."""
    steps, rounds, stock_rounds = (30, 3, 2) if quick else (40, 200, 16)
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        with Exporting(receiver.endpoint) as exporting:
            ours, lost = _ours(exporting, receiver, steps, rounds)
        stock = _stock(receiver, steps, stock_rounds)
    return [*lines_of(LOOP, ours, stock), lost]


def _ours(exporting: Exporting, receiver: Receiver, steps: int, rounds: int) -> tuple[Rounds, Line]:
    mine, others = machine.cores()
    engine = Engine()
    machine.pin_process(os.getpid(), others)
    machine.pin_this_thread(mine)
    run_steps(engine.step, steps)
    binding = Binding(engine)
    found = alternating(lambda: run_steps(engine.step, steps), binding, rounds)
    expected = binding.end_all()
    exporting.flush()
    return found, lost_line(f"{LOOP}: step spans lost or doubled", expected, receiver.counted())


def _stock(receiver: Receiver, steps: int, rounds: int) -> Rounds:
    engine, stock = Engine(), Stock(receiver.endpoint)
    run_steps(engine.step, steps)
    binding = StockBinding(engine, stock)
    found = alternating(lambda: run_steps(engine.step, steps), binding, rounds, after=stock.flush)
    binding.end_all()
    stock.close()
    receiver.counted()
    return found
