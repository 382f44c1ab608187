"""Measures the server beside a collector that takes 2 s per request, and accounts for every span.

256 sequences at 200 steps per second make 51,200 step spans per second if all are exported. Blocks with a fast collector, a slow one,
and a fast one as the control take turns. A fast collector takes what is queued after a slow block. In the end every offered span has
arrived or is counted as lost, also if the server ends meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from benchmarks import machine
from benchmarks.blocks import (
    Block,
    Rounds,
    compute_overhead,
    make_gated_lines,
    run_alternating,
    run_steps,
)
from benchmarks.engine import WAITING, Engine, iterate_at_pace
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.verdict import Control, Gate, Line, make_exact, make_line
from otel_infer import semconv

RESPONSE_S = 2.0
STEPS_PER_S = 200
BLOCK_S, ROUNDS = 10, 6
QUICK_S, QUICK_ROUNDS = 5, 1
PYTHON_US = 1000.0
MAX_MEMORY = 256
"""MiB, the default of OTEL_INFER_BUDGET."""
MAX_LATE_SHARE = 0.01
RING_LOSSES = ("events_overwritten", "events_torn")
MODES = {"all": "every step", "auto": "default budget"}
"""OTEL_INFER_STEPS and its name in the claims."""


class SlowCollector:
    """The collector, slow while switched on. `arrived`: spans received so far; `metrics`: the last export."""

    def __init__(self, receiver: Receiver, flush: Callable[[], None]) -> None:
        self._receiver, self._flush = receiver, flush
        self.arrived: Counter[str] = Counter()
        self.metrics: dict[str, dict[str, float]] = {}

    def switch_on(self) -> None:
        """Delays responses from now on."""
        self._receiver.delay_responses(RESPONSE_S)

    def switch_off(self) -> None:
        """Responds at once from now on, and waits until everything is sent."""
        self._receiver.delay_responses(0)
        self._flush()
        self.update_counts()

    def update_counts(self) -> None:
        """Adds what arrived since the last call."""
        counts = self._receiver.read_counts()
        self.arrived.update({name: counts[name] for name in ("spans", "unique", "steps")})
        self.metrics = counts["metrics"]


def measure(quick: bool) -> list[Line]:
    """Measures with every step exported, which exceeds such a collector, and with the default budget."""
    lines = []
    with Receiver() as receiver:
        _, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        for steps, mode in MODES.items():
            with Exporting(receiver.endpoint, steps=steps) as exporting:
                machine.pin_this_thread(others)  # the engine's front thread inherits these cores
                engine = Engine(python_us=PYTHON_US, wait_us=0)
                machine.pin_apart()
                collector = SlowCollector(receiver, exporting.flush)
                lines += _measure_mode(mode, engine, collector, exporting, quick)
        lines += _measure_shutdown(receiver)
    return lines


def _measure_mode(
    mode: str, engine: Engine, collector: SlowCollector, exporting: Exporting, quick: bool
) -> list[Line]:
    seconds, rounds = (QUICK_S, QUICK_ROUNDS) if quick else (BLOCK_S, ROUNDS)
    binding = Binding(engine)
    binding.switch_on()
    measured = run_alternating(lambda: run_paced(engine, seconds), collector, rounds, max_times_rounds=1)
    binding.switch_off()
    steps = binding.end_requests()
    collector.switch_off()
    return [
        *_make_step_lines(mode, measured, rounds),
        *account_spans(
            mode, steps, count_requests(engine), collector.arrived, collector.metrics, check_pace(measured)
        ),
        make_line(
            f"slow collector, {mode}: sidecar memory, peak",
            "MiB",
            make_exact(machine.read_peak_memory(exporting.pid) / 2**20),
            Gate(MAX_MEMORY),
        ),
    ]


def _measure_shutdown(receiver: Receiver) -> list[Line]:
    """Ends the server while the collector is slow."""
    collector = SlowCollector(receiver, lambda: None)
    with Exporting(receiver.endpoint):
        binding = Binding(Engine(python_us=PYTHON_US, wait_us=0))
        binding.switch_on()
        collector.switch_on()
        run_paced(binding.engine, QUICK_S)
        binding.switch_off()
        steps = binding.end_requests()
        requests = count_requests(binding.engine)
    time.sleep(RESPONSE_S)
    collector.update_counts()
    return account_spans("the server ends", steps, requests, collector.arrived, collector.metrics)


def count_requests(engine: Engine) -> int:
    """Returns the number of requests so far."""
    return len(engine.answered) + engine.size + WAITING


def run_paced(engine: Engine, seconds: float) -> Block:
    """Times steps at a fixed pace, without the pauses, in which the core stays awake."""
    pace = iterate_at_pace(int(seconds * STEPS_PER_S), 1 / STEPS_PER_S)
    blocks = [run_steps(engine.run_step, 1) for _ in pace]
    return Block(*map(np.concatenate, zip(*blocks)))


def _make_step_lines(mode: str, rounds: Rounds, wanted: int) -> list[Line]:
    """Compares steps beside the slow collector with steps beside a fast one."""
    judged, undisturbed = rounds.select_judged(wanted)
    claim = f"slow collector, {mode}: steps against a fast one"
    return [
        line
        for clock, clock_name in (("cpu", "CPU time"), ("wall", "wall clock"))
        for line in make_gated_lines(claim, clock_name, compute_overhead(judged, clock), undisturbed)
    ]


def check_pace(rounds: Rounds) -> Control:
    """Returns the control of the offered rate: a step longer than the pace delays the next ones."""
    late = float(
        np.mean(np.concatenate([block.wall for kind in rounds for block in kind]) > 1e9 / STEPS_PER_S)
    )
    return Control(f"{100 * late:.1f} % of steps late", late <= MAX_LATE_SHARE)


def account_spans(
    mode: str,
    steps: int,
    requests: int,
    arrived: Counter[str],
    metrics: dict[str, dict[str, float]],
    offered_in_time: Control | None = None,
) -> list[Line]:
    """Compares offered with arrived and lost spans.

    `steps` and `requests` are the server's own counts. The numbers of stage and startup spans come from the metrics, which lose none.
    """
    counted = int(sum(metrics[semconv.REQUEST_DURATION.name].values()))
    by_stage = metrics[semconv.STAGE_DURATION.name].items()
    stages = sum(int(count) for key, count in by_stage if semconv.STAGE_DETOKENIZE not in key.split(","))
    starts = int(sum(metrics.get(semconv.STARTUP_DURATION.name, {}).values()))
    lost = {reason: int(count) for reason, count in metrics[semconv.SELF_LOST.name].items() if count}
    lost_events = sum(lost.get(reason, 0) for reason in RING_LOSSES)
    offered, doubled = steps + requests + stages + starts, arrived["spans"] - arrived["unique"]
    missing = offered - arrived["unique"] - (sum(lost.values()) - lost_events)
    wrong = make_exact(abs(missing) + doubled + abs(requests - counted))
    note = f"{offered:,} offered, {arrived['unique']:,} arrived, lost: {lost or 'none'}"
    claim = f"slow collector, {mode}"
    return [
        make_line(
            f"{claim}: spans neither arrived nor counted as lost, or doubled", "", wrong, Gate(0), note=note
        ),
        make_line(
            f"{claim}: events overwritten in the rings", "", make_exact(lost_events), Gate(0), offered_in_time
        ),
    ]
