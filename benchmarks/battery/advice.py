"""Makes the change that `explain` advises, and measures how far the p99 of the cause falls.

    python -m benchmarks.battery.advice [--servers NAME …] [--faults NAME …] [--publish]

Each fault is drawn once without the change and once with it, with the same requests. Exit status 1 if a p99 falls by less
than 30 %. A measured pair is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.battery.draw import explain_tape, run_case
from benchmarks.battery.faults import FAULTS, SECONDS, Case
from benchmarks.battery.servers import SERVERS
from otel_infer.analysis.diagnosis.code_places import TIME_OF

RESULTS = Path(__file__).resolve().parents[2] / "build" / "battery-advice"
PUBLISHED = Path(__file__).resolve().parents[1] / "results" / "battery_advice.json"
LEAST_FALL = 0.30
NUMBER = 100
"""Of the draw: other requests than those of the battery's own draws."""
MAX_WORDS = 200


class Change(NamedTuple):
    """What is changed, in the words of the advice, and how. `servers`: where the fault is drawn."""

    advice: str
    apply: Callable[[Case], Case]
    servers: tuple[str, ...]


def without(*names: str) -> Callable[[Case], Case]:
    """Returns a change of the server's code: these mistakes are gone."""
    return lambda case: replace(
        case, mistakes={name: value for name, value in case.mistakes.items() if name not in names}
    )


def spread_burst(case: Case) -> Case:
    """Spreads the requests evenly, as a limit at ingress does."""
    ordered = sorted(case.requests, key=lambda request: request.at)
    times = np.linspace(0.2, 2 * SECONDS, len(ordered))
    return replace(case, requests=[replace(request, at=float(at)) for request, at in zip(ordered, times)])


def cap_prompts(case: Case) -> Case:
    """Caps all prompts."""
    return replace(
        case, requests=[replace(request, words=min(request.words, MAX_WORDS)) for request in case.requests]
    )


def wait_longer(case: Case) -> Case:
    """Gives clients a deadline that the server can meet, and no retries."""
    return replace(case, requests=[replace(request, deadline_s=0.0, retries=0) for request in case.requests])


THREADS, BLOCKED, ENCODER = "generate-threads", "generate-async", "embeddings"
CHANGES = {
    "lock": Change("hold the lock for less", without("lock"), (THREADS, ENCODER)),
    "semaphore": Change("hold it for less", without("semaphore"), (THREADS, ENCODER)),
    "blocked loop": Change(
        "move the blocking call off the event loop",
        lambda case: replace(case, mistakes={**case.mistakes, "off_loop": True}), (THREADS, ENCODER),
    ),
    "exhausted pool": Change("more threads if they only wait", without("workers"), (ENCODER,)),
    "hogs": Change("fewer processes on these cores", lambda case: replace(case, hogs=0), (THREADS, BLOCKED, ENCODER)),
    "busy threads": Change("fewer threads on these cores", without("busy_threads"), (THREADS, BLOCKED, ENCODER)),
    "slow end": Change("move work after the last token out of the request", without("after_ms", "after_share"), (THREADS, BLOCKED, ENCODER)),
    "slow database": Change(
        "make look-ups faster", lambda case: replace(case, database_s=case.database_s / 5), (THREADS, BLOCKED, ENCODER)
    ),
    "retry storm": Change("deadlines that the server can meet, no retries", wait_longer, (THREADS,)),
    "gc storm": Change("fewer long-lived objects", without("gc_objects", "gc_every_ms"), (THREADS, BLOCKED, ENCODER)),
    "memory pressure": Change(
        "make what runs before the engine faster", without("fresh_mb", "fresh_share"), (THREADS, BLOCKED, ENCODER)
    ),
    "slow log": Change("log less on the event loop", without("log_bytes"), (THREADS, BLOCKED, ENCODER)),
    "long prompts": Change("cap prompts", cap_prompts, (THREADS, ENCODER)),
    "burst": Change("spread load at the peak", spread_burst, (THREADS, ENCODER)),
}  # fmt: skip
"""By fault. A slow reader is the client's, and no change of the server removes it."""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.battery.advice", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--servers", nargs="*", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--faults", nargs="*", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--publish", action="store_true", help="write benchmarks/results/battery_advice.json")
    arguments = parser.parse_args()
    rows = [
        measure_change(server, fault)
        for fault in arguments.faults
        for server in CHANGES[fault].servers
        if server in arguments.servers and SERVERS[server].can_run
    ]
    if arguments.publish:
        PUBLISHED.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row for row in rows if row["fall"] < LEAST_FALL]
    print(f"{len(rows) - len(missed)} of {len(rows)} fall by {LEAST_FALL:.0%} or more")
    return int(bool(missed))


def measure_change(server: str, fault: str) -> dict[str, Any]:
    """Returns the p99 of the cause that the verdict names, without and with the change, ms."""
    folder = RESULTS / server / fault.replace(" ", "-")
    outcome = folder / "outcome.json"
    if outcome.exists():
        row: dict[str, Any] = json.loads(outcome.read_text())
    else:
        case = FAULTS[fault].draw(random.Random(f"{server} {fault} {NUMBER}"), SERVERS[server])
        reports = []
        for name, drawn in (("before", case), ("after", CHANGES[fault].apply(case))):
            client = run_case(SERVERS[server], drawn, folder / name, RESULTS)
            reports.append(explain_tape(folder / name / "server.tape", client["began_at"]))
        row = _compare(server, fault, *reports)
        outcome.write_text(json.dumps(row))
    print(
        f"{server:<18}{fault:<16}{row['cause']:<18}{row['before_ms']:>8.0f} → {row['after_ms']:>7.0f} ms  −{row['fall']:.0%}",
        flush=True,
    )
    return row


def _compare(server: str, fault: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the p99 of the time of the named cause in both; of the whole latency where no cause is named."""
    cause = before["findings"][0]["cause"] if before["findings"] else ""
    causes = TIME_OF.get(cause, (cause,)) if cause else ()
    p99 = [_percentile(report, causes) for report in (before, after)]
    fall = 1 - p99[1] / p99[0] if p99[0] else 0.0
    names = {"server": server, "fault": fault, "verdict": before["verdict"], "cause": cause or "none"}
    return {**names, "advice": CHANGES[fault].advice, "before_ms": p99[0], "after_ms": p99[1], "fall": fall}


def _percentile(report: dict[str, Any], causes: tuple[str, ...]) -> float:
    """Returns the p99 of the time of these causes, ms; without causes, of the latency."""
    times = [
        sum(request["causes_ms"].get(name, 0.0) for name in causes) if causes else request["duration_ms"]
        for request in report["worst"]
    ]
    return float(np.percentile(times, 99)) if times else 0.0


if __name__ == "__main__":
    sys.exit(main())
