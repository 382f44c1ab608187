"""Draws faults on real servers, and checks the verdict of `otel-infer explain` on the tape alone.

    python -m benchmarks.battery [--draws 6] [--servers NAME …] [--faults NAME …] [--again] [--sample N] [--publish]

A draw that was recorded is not run again; `--again` only explains the kept tapes anew. Exit status 1 if a bar is missed, or
if more than a third of a sample is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.battery.draw import explain_tape, run_draw
from benchmarks.battery.faults import FAULTS
from benchmarks.battery.servers import SERVERS
from benchmarks.battery.table import count_unexplained, has_largest_share, is_right, print_table

RESULTS = Path(__file__).resolve().parents[2] / "build" / "battery"
MAX_WRONG_OF_SAMPLE = 1 / 3
PUBLISHED = Path(__file__).resolve().parents[1] / "results" / "battery.json"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.battery", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--servers", nargs="*", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--again", action="store_true", help="explain the kept tapes, and run nothing")
    parser.add_argument("--sample", type=int, default=0, help="so many cells at random, a draw each")
    parser.add_argument(
        "--publish", action="store_true", help="put the outcomes into benchmarks/results/battery.json"
    )
    arguments = parser.parse_args()
    outcomes = [
        outcome
        for server, fault, number in _plan(arguments)
        if (outcome := _measure(server, fault, number, arguments.again)) is not None
    ]
    if arguments.publish:
        PUBLISHED.write_text(json.dumps(_merge_published(outcomes), indent=1) + "\n")
        print(f"{PUBLISHED}; now run python scripts/generate_docs.py")
    failed = print_table(outcomes)
    if arguments.sample:  # too few draws for the bars
        return int(sum(not outcome["right"] for outcome in outcomes) > MAX_WRONG_OF_SAMPLE * len(outcomes))
    return failed


def _plan(arguments: argparse.Namespace) -> list[tuple[str, str, int]]:
    cells = [
        (server, fault)
        for server in arguments.servers
        for fault in arguments.faults
        if server in FAULTS[fault].servers and (arguments.again or SERVERS[server].can_run)
    ]
    if arguments.sample:
        return [(*cell, 0) for cell in random.sample(cells, min(arguments.sample, len(cells)))]
    return [(*cell, number) for number in range(arguments.draws) for cell in cells]


def _merge_published(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns these outcomes with the published ones of other cells: no environment can run all servers."""
    drawn = {(one["server"], one["fault"]) for one in outcomes}
    published = json.loads(PUBLISHED.read_text()) if PUBLISHED.exists() else []
    return [one for one in published if (one["server"], one["fault"]) not in drawn] + outcomes


def _measure(server: str, fault: str, number: int, again: bool) -> dict[str, Any] | None:
    """Returns the outcome of a draw; None if it is not recorded and `again` is set."""
    folder = RESULTS / server / f"{fault.replace(', ', '-').replace(' ', '-')}-{number}"
    client = folder / "client.json"
    if not client.exists():
        if again:
            return None
        try:
            client.write_text(json.dumps(run_draw(SERVERS[server], fault, number, folder)))
        except (OSError, RuntimeError) as exc:  # the other draws go on
            print(f"{server} {fault} {number}: {exc}", file=sys.stderr, flush=True)
            return {"server": server, "fault": fault, "verdict": "not measured", "right": False}
    report = explain_tape(folder / "server.tape", json.loads(client.read_text()).get("began_at", 0.0))
    (folder / "explain.json").write_text(json.dumps(report))
    right = is_right(fault, report)
    shown = ", ".join(f"{name} {share:.0%}" for name, share in list(report["causes"].items())[:4])
    print(
        f"{server} {fault} {number}: {report['verdict']} {'✓' if right else '✗'}  ({shown})",
        file=sys.stderr,
        flush=True,
    )
    return {
        "server": server,
        "fault": fault,
        "verdict": report["verdict"],
        "right": right,
        "largest": has_largest_share(report),
        "requests": len(report["worst"]),
        "unexplained": count_unexplained(report, server),
    }


if __name__ == "__main__":
    sys.exit(main())
