"""Whether `otel-infer explain` names the complaint, from a tape alone, on a real server with a fault that was put there.

    python -m benchmarks.complaints [--draws 10] [--rows ROW …] [--mixed 20] [--healthy 20] [--json FILE]

For each row of the table so many draws of random severity, lengths and timing; then draws with two faults (either counts), and
servers that are fine, slow as a whole, or behind a slow network, where there is no complaint to name. Then what `explain` says
to change is changed: the p99 of the named cause, over the requests of all draws of a row, must fall by 30 %, or nothing of the
row is right. Ends with the confusion table; exit status 1 if the macro recall is below 90 %, or false alarms above 5 %.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.proxy import DelayingProxy

ROOT = Path(__file__).resolve().parent.parent
RECALL, FALSE_ALARMS, FALLS = 0.90, 0.05, 0.30
READY_S = 30.0


class Asked(NamedTuple):
    """A request: sent so many seconds after the begin, with a prompt and an answer of so many tokens."""

    at: float
    prompt: int
    tokens: int


class Case(NamedTuple):
    """A server with a fault, its load, and the server after what should be changed was changed."""

    expected: tuple[str, ...]
    faults: dict[str, Any]
    asked: list[Asked]
    mended: dict[str, Any]
    mended_asked: list[Asked]
    network_ms: float = 0.0


def steady(
    draw: random.Random, count: int, every_ms: float, tokens: tuple[int, int] = (10, 30)
) -> list[Asked]:
    at, asked = 0.2, []
    for _ in range(count):
        at += draw.expovariate(1000 / every_ms)
        asked.append(Asked(at, draw.randint(16, 64), draw.randint(*tokens)))
    return asked


def _longer(asked: list[Asked], draw: random.Random, prompt: tuple[int, int]) -> list[Asked]:
    return [one._replace(prompt=draw.randint(*prompt)) for one in asked]


def before_the_engine(draw: random.Random) -> Case:
    asked = steady(draw, 40, 60)
    return Case(("pre_engine",), {"lookup_ms": draw.uniform(80, 400)}, asked, {"lookup_ms": 4}, asked)


def queueing(draw: random.Random) -> Case:
    places = draw.randint(2, 4)
    asked = steady(draw, 50, draw.uniform(0.75, 0.95) * 165 / places)
    return Case(("queueing",), {"max_batch": places}, asked, {"max_batch": 32}, asked)


def prefill(draw: random.Random) -> Case:
    each = draw.uniform(0.1, 0.25)
    asked = _longer(steady(draw, 20, 1500), draw, (1500, 3000))
    short = [one._replace(prompt=one.prompt // 3) for one in asked]
    return Case(("prefill",), {"prompt_ms": each}, asked, {"prompt_ms": each}, short)


def stutter(draw: random.Random) -> Case:
    asked = steady(draw, 40, 80, (20, 50))
    if draw.random() < 0.5:
        faults = {"gc_every_ms": draw.uniform(250, 600), "gc_objects": draw.randint(600_000, 1_500_000)}
        return Case(("stutter",), faults, asked, {}, asked)
    long = set(draw.sample(range(40), 6))
    held = [
        one._replace(prompt=draw.randint(1200, 3000)) if i in long else one for i, one in enumerate(asked)
    ]
    return Case(("stutter",), {"prompt_ms": 0.1}, held, {"prompt_ms": 0.1}, asked)


def peak(draw: random.Random) -> Case:
    asked = steady(draw, 40, 100)
    middle = asked[20].at
    burst = [
        Asked(middle + draw.uniform(0, 0.3), 32, draw.randint(20, 40)) for _ in range(draw.randint(40, 70))
    ]
    return Case(("peak",), {"max_batch": 6}, asked + burst, {"max_batch": 64}, asked + burst)


def big_and_small(draw: random.Random) -> Case:
    light = steady(draw, 50, 120, (5, 12))
    heavy = [
        Asked(0.3 + 2.2 * turn + draw.uniform(0, 0.05), 400, draw.randint(80, 110))
        for turn in range(3)
        for _ in range(4)
    ]
    return Case(
        ("head_of_line_blocking",),
        {"max_batch": 4},
        light + heavy,
        {"max_batch": 4, "heavy_apart": True},
        light + heavy,
    )


def batching(draw: random.Random) -> Case:
    if draw.random() < 0.5:
        asked = steady(draw, 25, 300, (4, 8))
        return Case(("batching",), {"batch_delay_ms": draw.uniform(150, 400)}, asked, {}, asked)
    asked = steady(draw, 90, 25)
    faults = {"base_ms": 4, "each_ms": draw.uniform(1.0, 2.0), "max_batch": 64}
    fewer = asked[::3]  # the rest is served where nobody waits
    return Case(("batching",), faults, asked, {**faults, "max_batch": 8}, fewer)


def healthy(draw: random.Random) -> Case:
    kind = draw.choice(["fine", "slow", "network"])
    if kind == "slow":
        base = draw.uniform(20, 50)
        return Case(("healthy",), {"base_ms": base}, steady(draw, 30, 8 * base), {}, [])
    return Case(
        ("healthy",), {}, steady(draw, 40, 60), {}, [], draw.uniform(50, 200) if kind == "network" else 0.0
    )


def mixed(draw: random.Random) -> Case:
    """Two faults of which neither hides the other's."""
    first = before_the_engine(draw)
    other = draw.choice([stutter, queueing, peak, big_and_small])(draw)
    faults = {**other.faults, "lookup_ms": first.faults["lookup_ms"]}
    return Case((*first.expected, *other.expected), faults, other.asked, {}, [])


ROWS: dict[str, Callable[[random.Random], Case]] = {
    row.__name__: row
    for row in (before_the_engine, queueing, prefill, stutter, peak, big_and_small, batching)
}


# ── one draw ─────────────────────────────────────────────────────────────────────────────────────────────────────


def explained(faults: dict[str, Any], asked: Sequence[Asked], network_ms: float = 0.0) -> dict[str, Any]:
    """What `explain --json` says of a server with these faults under this load; nothing else goes by its side."""
    with tempfile.TemporaryDirectory(prefix="otel-infer-complaint-") as folder:
        tape = Path(folder) / "a.tape"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        here = [
            sys.executable,
            str(ROOT / "benchmarks" / "complaint_server.py"),
            str(port),
            json.dumps(faults),
        ]
        command = [sys.executable, "-m", "otel_infer", "run", "--tape", str(tape), "--", *here]
        environ = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        server = subprocess.Popen(command, env={**_environment(), **environ}, stderr=subprocess.DEVNULL)
        try:
            _ready(port)
            with DelayingProxy(port, network_ms / 1000) as proxy:
                _load(proxy.port, asked)
        finally:
            server.terminate()
            server.wait(30)
        words = [sys.executable, "-m", "otel_infer", "explain", str(tape), "--json", "--worst", "10000"]
        said: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        return said


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def _ready(port: int) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not get ready")


def _load(port: int, asked: Sequence[Asked]) -> None:
    began = time.monotonic()
    clients = [threading.Thread(target=_ask, args=(port, one, began)) for one in asked]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def _ask(port: int, one: Asked, began: float) -> None:
    time.sleep(max(began + one.at - time.monotonic(), 0))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"prompt": one.prompt, "tokens": one.tokens})
    connection.request("POST", "/v1/generate", body, {"content-type": "application/json"})
    response = connection.getresponse()
    while response.read1():
        pass
    connection.close()


def spent_ms(said: dict[str, Any], cause: str) -> list[float]:
    """On one cause by each request, those included that had none of it."""
    return [one["causes_ms"].get(cause, 0.0) for one in said["worst"]]


def fell(before: list[float], after: list[float]) -> float:
    """By which share the p99 fell."""
    was, is_now = (float(np.percentile(lengths or [0.0], 99)) for lengths in (before, after))
    return 1 - is_now / was if was else 0.0


class Outcome(NamedTuple):
    """What was named, and what each request spent on its cause (ms) before and after that was changed (if it was)."""

    expected: tuple[str, ...]
    named: str
    before: list[float]
    after: list[float]


def outcome(case: Case) -> Outcome:
    """One draw from fault to remedy."""
    said = explained(case.faults, case.asked, case.network_ms)
    named = said["verdict"]
    if named not in case.expected or not case.mended_asked:
        return Outcome(case.expected, named, [], [])
    cause = said["findings"][0]["cause"]
    mended = explained(case.mended, case.mended_asked)
    return Outcome(case.expected, named, spent_ms(said, cause), spent_ms(mended, cause))


# ── all ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    """Runs the draws and prints the confusion table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10, help="of each row (10)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--mixed", type=int, default=20, help="draws with two faults (20)")
    parser.add_argument("--healthy", type=int, default=20, help="draws without a fault (20)")
    parser.add_argument("--json", metavar="FILE", help="write every outcome")
    arguments = parser.parse_args()
    plan = [(row, ROWS[row]) for row in arguments.rows for _ in range(arguments.draws)]
    plan += [("mixed", mixed)] * arguments.mixed + [("healthy", healthy)] * arguments.healthy
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for number, (row, make) in enumerate(plan):
        one = outcome(make(random.Random(f"{row} {number}")))
        outcomes[row].append(one)
        mended = (
            f", and its p99 fell by {fell(one.before, one.after):.0%} when that was changed"
            if one.after
            else ""
        )
        print(f"{number + 1}/{len(plan)} {row}: named {one.named}{mended}", file=sys.stderr, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(outcomes))
    return _table(outcomes)


def _table(outcomes: dict[str, list[Outcome]]) -> int:
    names = [*ROWS, "healthy", "insufficient"]
    print("the fault that was there, what explain named, and by how much the p99 fell when that was changed")
    print(f"{'':<20}" + "".join(f"{name[:10]:>11}" for name in names) + f"{'right':>9}{'p99 fell':>10}")
    recalls = []
    for row, found in outcomes.items():
        named = Counter(one.named for one in found)
        by = fell([ms for one in found for ms in one.before], [ms for one in found for ms in one.after])
        is_mended = by >= FALLS or row not in ROWS
        right = is_mended * sum(one.named in one.expected for one in found) / len(found)
        said = f"{by:>10.0%}" if row in ROWS else ""
        print(f"{row:<20}" + "".join(f"{named[name] or '':>11}" for name in names) + f"{right:>9.0%}{said}")
        if row in ROWS or row == "mixed":
            recalls.append(right)
    fine = outcomes.get("healthy", [])
    alarms = sum(one.named not in ("healthy", "insufficient") for one in fine) / max(len(fine), 1)
    recall = float(np.mean(recalls)) if recalls else 1.0
    print(
        f"macro recall {recall:.0%} (at least {RECALL:.0%}), false alarms {alarms:.0%} (at most {FALSE_ALARMS:.0%})"
    )
    return 0 if recall >= RECALL and alarms <= FALSE_ALARMS else 1


if __name__ == "__main__":
    sys.exit(main())
