"""A collector that takes two seconds for every request: what the server notices of it, and what becomes of the spans.

256 sequences at 200 steps a second, which is 51,200 step spans a second if all are exported. Blocks of some seconds with a
fast collector, a slow one, and a fast one again as the control take turns; what is still queued after a slow block is taken
by a fast collector before the next one begins. In the end every span that was offered has arrived, or is counted as lost; also if
the server ends meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from benchmarks import machine
from benchmarks.blocks import Block, Rounds, alternating, gated, overhead, run_steps
from benchmarks.engine import WAITING, Engine, at_pace
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.verdict import Control, Gate, Line, exactly, line
from otel_infer import semconv

ANSWER_S = 2.0
STEPS_PER_S = 200
BLOCK_S, ROUNDS = 10, 6
QUICK_S, QUICK_ROUNDS = 5, 1
PYTHON_US = 1000.0
MOST_MEMORY = 256
"""MiB: what OTEL_INFER_BUDGET allows by default."""
MOST_LATE = 0.01
LOST_FACTS = ("events_overwritten", "events_torn")
MODES = {"all": "every step", "auto": "default budget"}


class Slow:
    """The collector as something to be put on and taken off; `arrived`: what it was sent, added up."""

    def __init__(self, receiver: Receiver, flush: Callable[[], None]) -> None:
        self._receiver, self._flush = receiver, flush
        self.arrived: Counter[str] = Counter()
        self.metrics: dict[str, dict[str, float]] = {}
        self.own_memory = 0

    def put_on(self) -> None:
        """Slow from now on."""
        self._receiver.answer_after(ANSWER_S)

    def take_off(self) -> None:
        """Fast from now on, with nothing left to send."""
        self._receiver.answer_after(0)
        self._flush()
        self.count()

    def count(self) -> None:
        """What has arrived since."""
        found = self._receiver.counted()
        self.arrived.update({name: found[name] for name in ("spans", "unique", "steps")})
        self.metrics = found["metrics"]


def measure(quick: bool) -> list[Line]:
    """With every step exported, which such a collector cannot take, and inside the default budget."""
    rows = []
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        for steps, said in MODES.items():
            with Exporting(receiver.endpoint, steps=steps) as exporting:
                machine.pin_this_thread(others)  # the engine's front thread stays there
                engine = Engine(python_us=PYTHON_US, wait_us=0)
                machine.pin_apart()
                rows += _mode(said, engine, Slow(receiver, exporting.flush), exporting, quick)
        rows += _ending(receiver)
    return rows


def _mode(said: str, engine: Engine, slow: Slow, exporting: Exporting, quick: bool) -> list[Line]:
    seconds, rounds = (QUICK_S, QUICK_ROUNDS) if quick else (BLOCK_S, ROUNDS)
    binding = Binding(engine)
    binding.put_on()
    found = alternating(lambda: paced(engine, seconds), slow, rounds, patience=1)
    binding.take_off()
    steps = binding.end_all()
    slow.take_off()
    kept = account(said, steps, opened(engine), slow.arrived, slow.metrics, in_time(found))
    memory = exactly(machine.peak_memory(exporting.pid) / 2**20)
    claim = f"slow collector, {said}: sidecar memory, most"
    return [*step_lines(said, found, rounds), *kept, line(claim, "MiB", memory, Gate(MOST_MEMORY))]


def _ending(receiver: Receiver) -> list[Line]:
    """The server ends while the collector is slow: the sidecar tries for some seconds, then counts what is left."""
    slow = Slow(receiver, lambda: None)
    with Exporting(receiver.endpoint):
        binding = Binding(Engine(python_us=PYTHON_US, wait_us=0))
        binding.put_on()
        slow.put_on()
        paced(binding.engine, QUICK_S)
        binding.take_off()
        steps = binding.end_all()
        requests = opened(binding.engine)
    time.sleep(ANSWER_S)
    slow.count()
    return account("the server ends", steps, requests, slow.arrived, slow.metrics)


def opened(engine: Engine) -> int:
    """How many requests there were."""
    return len(engine.answered) + engine.size + WAITING


def paced(engine: Engine, seconds: float) -> Block:
    """Steps at a fixed pace, each timed without the wait for the next, in which the core stays awake."""
    pace = at_pace(int(seconds * STEPS_PER_S), 1 / STEPS_PER_S)
    blocks = [run_steps(engine.step, 1) for _ in pace]
    return Block(*map(np.concatenate, zip(*blocks)))


def step_lines(said: str, rounds: Rounds, wanted: int) -> list[Line]:
    """Steps with a slow collector against steps with a fast one."""
    judged, undisturbed = rounds.judged(wanted)
    claim = f"slow collector, {said}: steps against a fast one"
    clocks = (("cpu", "CPU time"), ("wall", "wall clock"))
    return [row for clock, by in clocks for row in gated(claim, by, overhead(judged, clock), undisturbed)]


def in_time(rounds: Rounds) -> Control:
    """A step that takes longer than its turn is late, and so are those after it: fewer were offered than is claimed."""
    late = float(
        np.mean(np.concatenate([block.wall for kind in rounds for block in kind]) > 1e9 / STEPS_PER_S)
    )
    return Control(f"{100 * late:.1f} % of steps late", late <= MOST_LATE)


def account(
    said: str,
    steps: int,
    requests: int,
    arrived: Counter[str],
    metrics: dict[str, dict[str, float]],
    offered_in_time: Control | None = None,
) -> list[Line]:
    """`steps` and `requests` by the server's own count; how many stages those have, and the start of the server, the metrics
    say, which lose none."""
    counted = int(sum(metrics[semconv.REQUEST_DURATION.name].values()))
    by_stage = metrics[semconv.STAGE_DURATION.name].items()
    stages = sum(int(count) for key, count in by_stage if semconv.STAGE_DETOKENIZE not in key.split(","))
    starts = int(sum(metrics.get(semconv.STARTUP_DURATION.name, {}).values()))
    lost = {reason: int(count) for reason, count in metrics[semconv.SELF_LOST.name].items() if count}
    facts = sum(lost.get(reason, 0) for reason in LOST_FACTS)
    offered, doubled = steps + requests + stages + starts, arrived["spans"] - arrived["unique"]
    missing = offered - arrived["unique"] - (sum(lost.values()) - facts)
    wrong = exactly(abs(missing) + doubled + abs(requests - counted))
    note = f"{offered:,} offered, {arrived['unique']:,} arrived, lost: {lost or 'none'}"
    claim = f"slow collector, {said}"
    return [
        line(
            f"{claim}: spans neither arrived nor counted as lost, or doubled", "", wrong, Gate(0), note=note
        ),
        line(f"{claim}: facts overwritten in the rings", "", exactly(facts), Gate(0), offered_in_time),
    ]
