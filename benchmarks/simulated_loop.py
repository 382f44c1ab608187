"""The decode loop of the simulated engine: 256 running, every step of every request exported as a span."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import machine, neighbours
from benchmarks.awake import awake
from benchmarks.blocks import Hooked, Rounds, alternating, lines_of, run_steps
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Line, lost_line

LOOP = "simulated loop, 256 running"


def measure(quick: bool) -> list[Line]:
    """Ours first, then the stock SDK on the same engine to the same receiver."""
    steps, rounds, stock_rounds = (20, 3, 2) if quick else (20, 720, 12)
    mine, others = machine.cores()
    with awake(others), Receiver() as receiver:
        machine.pin_process(receiver.pid, others)
        with Exporting(receiver.endpoint) as exporting:
            neighbours.wait_until_undisturbed(mine)
            engine = Engine()
            machine.pin_apart()
            binding = Binding(engine)
            ours = _measured(engine, binding, steps, rounds)
            expected = binding.end_all()
            exporting.flush()
            lost = lost_line(f"{LOOP}: step spans lost or doubled", expected, receiver.counted())
        stock = Stock(receiver.endpoint)
        machine.pin_apart()  # the thread in which that exports
        theirs_on = StockBinding(engine, stock)
        theirs = _measured(engine, theirs_on, steps, stock_rounds, after=stock.flush)
        theirs_on.end_all()
        stock.close()
    return [*lines_of(LOOP, ours, rounds, theirs), lost]


def _measured(
    engine: Engine, hooks: Hooked, steps: int, rounds: int, after: Callable[[], None] | None = None
) -> Rounds:
    run_steps(engine.step, steps)
    return alternating(lambda: run_steps(engine.step, steps), hooks, rounds, after)
