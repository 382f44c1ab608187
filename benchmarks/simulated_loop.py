"""The decode loop of the simulated engine: 256 sequences, each step of each request exported as a span."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import machine, neighbours
from benchmarks.awake import keep_awake
from benchmarks.blocks import Rounds, Switchable, make_lines, run_alternating, run_steps
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Line, make_lost_line

LOOP = "simulated loop, 256 running"


def measure(quick: bool) -> list[Line]:
    """Measures otel_infer, then the stock SDK on the same engine with the same receiver."""
    steps, rounds, stock_rounds = (20, 3, 2) if quick else (20, 720, 12)
    mine, others = machine.choose_cores()
    with keep_awake(others), Receiver() as receiver:
        machine.pin_process(receiver.pid, others)
        with Exporting(receiver.endpoint) as exporting:
            neighbours.wait_until_undisturbed(mine)
            engine = Engine()
            machine.pin_apart()
            binding = Binding(engine)
            ours = _measure_loop(engine, binding, steps, rounds)
            expected = binding.end_requests()
            exporting.flush()
            lost = make_lost_line(f"{LOOP}: step spans lost or doubled", expected, receiver.read_counts())
        stock = Stock(receiver.endpoint)
        machine.pin_apart()  # the exporting thread of the stock SDK
        stock_binding = StockBinding(engine, stock)
        theirs = _measure_loop(engine, stock_binding, steps, stock_rounds, after=stock.flush)
        stock_binding.end_requests()
        stock.close()
    return [*make_lines(LOOP, ours, rounds, theirs), lost]


def _measure_loop(
    engine: Engine, hooks: Switchable, steps: int, rounds: int, after: Callable[[], None] | None = None
) -> Rounds:
    run_steps(engine.run_step, steps)
    return run_alternating(lambda: run_steps(engine.run_step, steps), hooks, rounds, after)
