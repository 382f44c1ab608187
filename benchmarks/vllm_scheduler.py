"""The hooks on vLLM's real Scheduler, without a model, beside those of an older release.

    make bench-vllm ARGS="--only vllm_scheduler"

`transformers_scheduler` measures the hooks on transformers' scheduler in the same way.

Each release has a process of its own. They take turns, because the machine's pace changes: a pair of turns gives a ratio. The unit of
the warm gates is the step of an own list, unchanged, as in the section hooks, measured in the same round.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks import hooks, machine, own_list, verdict
from benchmarks.hook_cases import Case
from benchmarks.verdict import Figure, Gate, Line
from otel_infer.cli.demo.model import make_demo_model

ROOT = Path(__file__).parents[1]
SCHEDULER = "vLLM's scheduler"
OLDER = "404832e"
"""The release before hooks relied on vLLM's own report of what changed."""
SIZES = 1, 8, 64, 256
WARM_GATES = dict(zip(SIZES, (4.0, 4.0, 6.0, 12.0)))
"""Largest multiple of an unchanged own list, by number running."""
MAX_SHARE = 0.6
"""Largest upper bound of the share of the older release; half is aimed at."""
ROUNDS, STEPS, OWN_STEPS = 24, 40, 300
QUICK_ROUNDS, QUICK_STEPS = 3, 10
ENVIRON = {
    "VLLM_PLUGINS": "none",
    "OTEL_INFER_ENABLED": "off",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


class Turn(NamedTuple):
    """Steps of one kind: the number running, and what happens between them."""

    size: int
    changes: bool
    uses_caches: bool

    def describe(self, scheduler: str) -> str:
        """Returns the begin of a claim about this scheduler."""
        members = "one joins and one leaves per step" if self.changes else "members constant"
        caches = "caches used by something else" if self.uses_caches else "warm caches"
        return f"{scheduler}, {self.size} running, {members}, {caches}"


TURNS = [Turn(*kind) for kind in product(SIZES, (False, True), (False, True))]


class Release:
    """A process with the hooks of one release, found at `path`."""

    def __init__(self, path: Path, model: Path, script: str) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / script), str(model)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRON, "PYTHONPATH": str(path)},
        )
        self._read("ready")

    def _read(self, what: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(what):
                return line
        raise RuntimeError("a process with a scheduler ended early")

    def take_turn(self, turn: Turn, steps: int, cores: set[int]) -> float:
        """Returns the time of the hooks per step, ns."""
        machine.pin_process(self._process.pid, cores)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*turn, steps]) + "\n")
        self._process.stdin.flush()
        hooked, bare = json.loads(self._read("["))
        return float(hooked - bare)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def _start_releases(script: str) -> Iterator[tuple[Release, Release | None]]:
    """Yields this release and the older one; None where it cannot be built, as without git or a package index."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_demo_model(Path(folder) / "model")
        older = _install_older(Path(folder))
        releases = (
            Release(ROOT, model, script),
            Release(older, model, script) if older is not None else None,
        )
        try:
            yield releases
        finally:
            for release in releases:
                if release is not None:
                    release.close()


def _install_older(folder: Path) -> Path | None:
    source, target = folder / "source", folder / "older"
    source.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(target), str(source)]
    try:
        archive = subprocess.run(["git", "archive", OLDER], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
        subprocess.run(pip, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the hooks of {OLDER} are left out: {error}", file=sys.stderr)
        return None
    return target


def measure(quick: bool) -> list[Line]:
    """Measures vLLM's scheduler."""
    return measure_scheduler(SCHEDULER, "vllm_scheduler_turns.py", quick)


def measure_scheduler(scheduler: str, script: str, quick: bool) -> list[Line]:
    """Measures all turns in each round, in random order. `script`: takes the turns."""
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    own_list.record_in_memory()
    unit, rng = next(iter(own_list.make_cases())), random.Random(1)
    costs: dict[Turn, list[tuple[float, float, float]]] = {turn: [] for turn in TURNS}
    with _start_releases(script) as (ours, older):
        allowed = machine.read_allowed_cores()
        for number in range(rounds):
            core = machine.find_fastest_core(allowed)
            machine.pin_this_thread(core)
            for turn in rng.sample(TURNS, len(TURNS)):
                in_turn = (ours, older) if number % 2 else (older, ours)
                taken = {one: one.take_turn(turn, steps, core) for one in in_turn if one is not None}
                before = taken[older] if older is not None else float("nan")
                costs[turn].append((taken[ours], before, _measure_unit(unit)))
    return [line for turn in TURNS for line in make_lines(turn, costs[turn], scheduler)]


def _measure_unit(case: Case) -> float:
    """Returns the time of the hooks per step of an own list, ns."""
    taken = []
    for run_steps in (case.bare, case.hooked):
        case.before(OWN_STEPS)
        taken.append(hooks._measure_cpu_ns(run_steps, OWN_STEPS))
    return taken[1] - taken[0]


def make_lines(turn: Turn, costs: list[tuple[float, float, float]], scheduler: str = SCHEDULER) -> list[Line]:
    """Returns the rows of a turn, of (ours, older, unit) per round. The gates are for constant members."""
    ours = verdict.estimate_median([cost / 1000 for cost, _, _ in costs])
    note = f"{ours.value:.1f} µs [{ours.low:.1f}, {ours.high:.1f}] per step"
    lines = []
    if not turn.uses_caches:
        gate = None if turn.changes else Gate(WARM_GATES[turn.size])
        multiple = verdict.estimate_median([cost / unit for cost, _, unit in costs])
        claim = f"{turn.describe(scheduler)}: hooks, as a multiple of an own list unchanged"
        lines.append(verdict.make_line(claim, "×", multiple, gate, note=note))
    shares = verdict.estimate_median([cost / before for cost, before, _ in costs])
    if shares.value == shares.value:
        lines.append(make_share_line(turn, shares, note, scheduler))
    return lines


def make_share_line(turn: Turn, shares: Figure, note: str, scheduler: str) -> Line:
    """Returns the row of the share of the older release. A gate fails by the upper bound, with no third verdict."""
    gate = Gate(MAX_SHARE) if turn.uses_caches and not turn.changes else None
    line = verdict.make_line(
        f"{turn.describe(scheduler)}: hooks, as a share of those of {OLDER}", "", shares, gate, note=note
    )
    if line.verdict == verdict.INCONCLUSIVE:
        line.verdict = verdict.FAIL
    return line
