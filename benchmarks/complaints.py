"""Measures whether `otel-infer explain` names the symptom of a server with a known fault, from a recording alone.

    python -m benchmarks.complaints [--draws 10] [--rows ROW …] [--mixed 20] [--healthy 20] [--json FILE]

Each row has draws of random severity, lengths and timing. Other draws have two faults (either counts), or none:
healthy, slow as a whole, or behind a slow network. Then the named cause is changed. The p99 of that cause, over all
draws of a row, must fall by 30 %, or no draw of the row counts as right. Exit status 1 if the macro recall is below 90
%, or false alarms are above 5 %.
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
from otel_infer.cli.demo.free_port import find_free_port

ROOT = Path(__file__).resolve().parent.parent
MIN_RECALL, MAX_FALSE_ALARMS, MIN_FALL = 0.90, 0.05, 0.30
MAX_START_S = 30.0
SYMPTOMS = (
    "pre_engine",
    "queueing",
    "prefill",
    "stutter",
    "peak",
    "head_of_line_blocking",
    "batching",
    "healthy",
    "insufficient",
)


class TimedRequest(NamedTuple):
    """A request at this time (s), with this many prompt and output tokens."""

    at: float
    prompt: int
    tokens: int


class Case(NamedTuple):
    """A server with a fault and its load, and the server and load after the change."""

    expected: tuple[str, ...]
    faults: dict[str, Any]
    requests: list[TimedRequest]
    fixed: dict[str, Any]
    fixed_requests: list[TimedRequest]
    network_ms: float = 0.0


def draw_requests(
    rng: random.Random, count: int, every_ms: float, tokens: tuple[int, int] = (10, 30)
) -> list[TimedRequest]:
    at, requests = 0.2, []
    for _ in range(count):
        at += rng.expovariate(1000 / every_ms)
        requests.append(TimedRequest(at, rng.randint(16, 64), rng.randint(*tokens)))
    return requests


def _lengthen_prompts(
    requests: list[TimedRequest], rng: random.Random, prompt: tuple[int, int]
) -> list[TimedRequest]:
    return [request._replace(prompt=rng.randint(*prompt)) for request in requests]


def before_the_engine(rng: random.Random) -> Case:
    requests = draw_requests(rng, 40, 60)
    return Case(("pre_engine",), {"lookup_ms": rng.uniform(80, 400)}, requests, {"lookup_ms": 4}, requests)


def queueing(rng: random.Random) -> Case:
    places = rng.randint(2, 4)
    requests = draw_requests(rng, 50, rng.uniform(0.75, 0.95) * 165 / places)
    return Case(("queueing",), {"max_batch": places}, requests, {"max_batch": 32}, requests)


def prefill(rng: random.Random) -> Case:
    each = rng.uniform(0.1, 0.25)
    requests = _lengthen_prompts(draw_requests(rng, 20, 1500), rng, (1500, 3000))
    short = [request._replace(prompt=request.prompt // 3) for request in requests]
    return Case(("prefill",), {"prompt_ms": each}, requests, {"prompt_ms": each}, short)


def stutter(rng: random.Random) -> Case:
    requests = draw_requests(rng, 40, 80, (20, 50))
    if rng.random() < 0.5:
        faults = {"gc_every_ms": rng.uniform(250, 600), "gc_objects": rng.randint(600_000, 1_500_000)}
        return Case(("stutter",), faults, requests, {}, requests)
    long = set(rng.sample(range(40), 6))
    lengthened = [
        request._replace(prompt=rng.randint(1200, 3000)) if i in long else request
        for i, request in enumerate(requests)
    ]
    return Case(("stutter",), {"prompt_ms": 0.1}, lengthened, {"prompt_ms": 0.1}, requests)


def peak(rng: random.Random) -> Case:
    requests = draw_requests(rng, 40, 100)
    middle = requests[20].at
    burst = [
        TimedRequest(middle + rng.uniform(0, 0.3), 32, rng.randint(20, 40))
        for _ in range(rng.randint(40, 70))
    ]
    return Case(("peak",), {"max_batch": 6}, requests + burst, {"max_batch": 64}, requests + burst)


def big_and_small(rng: random.Random) -> Case:
    light = draw_requests(rng, 50, 120, (5, 12))
    heavy = [
        TimedRequest(0.3 + 2.2 * turn + rng.uniform(0, 0.05), 400, rng.randint(80, 110))
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


def batching(rng: random.Random) -> Case:
    if rng.random() < 0.5:
        requests = draw_requests(rng, 25, 300, (4, 8))
        return Case(("batching",), {"batch_delay_ms": rng.uniform(150, 400)}, requests, {}, requests)
    requests = draw_requests(rng, 90, 25)
    faults = {"base_ms": 4, "each_ms": rng.uniform(1.0, 2.0), "max_batch": 64}
    fewer = requests[::3]  # other servers take the rest
    return Case(("batching",), faults, requests, {**faults, "max_batch": 8}, fewer)


def healthy(rng: random.Random) -> Case:
    kind = rng.choice(["fine", "slow", "network"])
    if kind == "slow":
        base = rng.uniform(20, 50)
        return Case(("healthy",), {"base_ms": base}, draw_requests(rng, 30, 8 * base), {}, [])
    return Case(
        ("healthy",),
        {},
        draw_requests(rng, 40, 60),
        {},
        [],
        rng.uniform(50, 200) if kind == "network" else 0.0,
    )


def mixed(rng: random.Random) -> Case:
    """Returns a server with two faults, neither of which hides the other."""
    first = before_the_engine(rng)
    other = rng.choice([stutter, queueing, peak, big_and_small])(rng)
    faults = {**other.faults, "lookup_ms": first.faults["lookup_ms"]}
    return Case((*first.expected, *other.expected), faults, other.requests, {}, [])


ROWS: dict[str, Callable[[random.Random], Case]] = {
    row.__name__: row
    for row in (before_the_engine, queueing, prefill, stutter, peak, big_and_small, batching)
}


# ── one draw ─────────────────────────────────────────────────────────────────────────────────────────────────────


def explain_faults(
    faults: dict[str, Any], requests: Sequence[TimedRequest], network_ms: float = 0.0
) -> dict[str, Any]:
    """Returns what `explain --json` reports about a server with these faults under this load."""
    with tempfile.TemporaryDirectory(prefix="otel-infer-complaint-") as folder:
        tape = Path(folder) / "a.tape"
        port = find_free_port()
        server_command = [
            sys.executable,
            str(ROOT / "benchmarks" / "complaint_server.py"),
            str(port),
            json.dumps(faults),
        ]
        command = [sys.executable, "-m", "otel_infer", "run", "--tape", str(tape), "--", *server_command]
        environ = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
        server = subprocess.Popen(command, env={**_make_environment(), **environ}, stderr=subprocess.DEVNULL)
        try:
            _wait_until_ready(port)
            with DelayingProxy(port, network_ms / 1000) as proxy:
                _run_load(proxy.port, requests)
        finally:
            server.terminate()
            server.wait(30)
        explain = [sys.executable, "-m", "otel_infer", "explain", str(tape), "--json", "--worst", "10000"]
        report: dict[str, Any] = json.loads(subprocess.run(explain, capture_output=True, check=True).stdout)
        return report


def _make_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def _wait_until_ready(port: int) -> None:
    until = time.monotonic() + MAX_START_S
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server was not ready in time")


def _run_load(port: int, requests: Sequence[TimedRequest]) -> None:
    began = time.monotonic()
    clients = [threading.Thread(target=_send_request, args=(port, request, began)) for request in requests]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def _send_request(port: int, request: TimedRequest, began: float) -> None:
    time.sleep(max(began + request.at - time.monotonic(), 0))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"prompt": request.prompt, "tokens": request.tokens})
    connection.request("POST", "/v1/generate", body, {"content-type": "application/json"})
    response = connection.getresponse()
    while response.read1():
        pass
    connection.close()


def list_cause_ms(report: dict[str, Any], cause: str) -> list[float]:
    """Returns the time of each request on one cause; 0 = none."""
    return [request["causes_ms"].get(cause, 0.0) for request in report["worst"]]


def compute_fall(before: list[float], after: list[float]) -> float:
    """Returns the fall of the p99, as a share."""
    old, new = (float(np.percentile(times or [0.0], 99)) for times in (before, after))
    return 1 - new / old if old else 0.0


class Outcome(NamedTuple):
    """The named symptom, and the time of each request on its cause (ms) before and after the change; empty = not
    changed."""

    expected: tuple[str, ...]
    named: str
    before: list[float]
    after: list[float]


def measure_outcome(case: Case) -> Outcome:
    """Runs one draw, and the change of the named cause."""
    report = explain_faults(case.faults, case.requests, case.network_ms)
    named = report["verdict"]
    if named not in case.expected or not case.fixed_requests:
        return Outcome(case.expected, named, [], [])
    cause = report["findings"][0]["cause"]
    fixed = explain_faults(case.fixed, case.fixed_requests)
    return Outcome(case.expected, named, list_cause_ms(report, cause), list_cause_ms(fixed, cause))


# ── all draws ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    """Runs the draws and prints the confusion table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=10, help="draws of each row (10)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--mixed", type=int, default=20, help="draws with two faults (20)")
    parser.add_argument("--healthy", type=int, default=20, help="draws without a fault (20)")
    parser.add_argument("--json", metavar="FILE", help="write every outcome")
    arguments = parser.parse_args()
    plan = [(row, ROWS[row]) for row in arguments.rows for _ in range(arguments.draws)]
    plan += [("mixed", mixed)] * arguments.mixed + [("healthy", healthy)] * arguments.healthy
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for number, (row, make_case) in enumerate(plan):
        outcome = measure_outcome(make_case(random.Random(f"{row} {number}")))
        outcomes[row].append(outcome)
        fall = (
            f", and its p99 fell by {compute_fall(outcome.before, outcome.after):.0%} after the change"
            if outcome.after
            else ""
        )
        print(f"{number + 1}/{len(plan)} {row}: named {outcome.named}{fall}", file=sys.stderr, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(outcomes))
    return _print_table(outcomes)


def _print_table(outcomes: dict[str, list[Outcome]]) -> int:
    print("fault, named symptom, and fall of the p99 of the named cause after the change")
    print(f"{'':<20}" + "".join(f"{name[:10]:>11}" for name in SYMPTOMS) + f"{'right':>9}{'p99 fell':>10}")
    recalls = []
    for row, of_row in outcomes.items():
        named = Counter(outcome.named for outcome in of_row)
        before = [ms for outcome in of_row for ms in outcome.before]
        fall = compute_fall(before, [ms for outcome in of_row for ms in outcome.after])
        right = sum(outcome.named in outcome.expected for outcome in of_row) / len(of_row)
        if row in ROWS and fall < MIN_FALL:
            right = 0.0
        cells = "".join(f"{named[name] or '':>11}" for name in SYMPTOMS)
        print(f"{row:<20}{cells}{right:>9.0%}" + (f"{fall:>10.0%}" if row in ROWS else ""))
        if row in ROWS or row == "mixed":
            recalls.append(right)
    healthy_draws = outcomes.get("healthy", [])
    false_alarms = sum(outcome.named not in ("healthy", "insufficient") for outcome in healthy_draws)
    alarms = false_alarms / max(len(healthy_draws), 1)
    recall = float(np.mean(recalls)) if recalls else 1.0
    print(f"macro recall {recall:.0%} (at least {MIN_RECALL:.0%})")
    print(f"false alarms {alarms:.0%} (at most {MAX_FALSE_ALARMS:.0%})")
    return 0 if recall >= MIN_RECALL and alarms <= MAX_FALSE_ALARMS else 1


if __name__ == "__main__":
    sys.exit(main())
