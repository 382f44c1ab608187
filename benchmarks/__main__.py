"""Measures everything and ends with one table: claim, gate, measured, control, verdict.

    python -m benchmarks [--quick] [--only SECTION …] [--json FILE] [--docs FILE] [--report] [--peers-python PATH]

Exit status 1 if a gate failed (0 with --report). A line whose control is off is inconclusive, which is no failure and no
pass: repeat it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import machine, verdict
from benchmarks.awake import awake
from benchmarks.verdict import Line

SECTIONS = (
    "hooks",
    "simulated_loop",
    "transformers_loop",
    "throughput",
    "asgi",
    "peers",
    "retention",
    "slow_collector",
    "memory",
    "accuracy",
    "truth",
)
ELSEWHERE = ("vllm",)
"""Sections that run in an environment of their own, where they are asked for by name."""
MODULES = {"asgi": "asgi_requests", "vllm": "vllm_serving"}
NOT_QUICK = ("truth",)
KEEP_AWAKE_THEMSELVES = ("slow_collector", "simulated_loop")
"""Sections that decide which cores are kept awake. The simulated loop never sleeps, and a loop that keeps its core awake would
take a tick of it now and then. Beside the slow collector that loop is left out, for Linux shares cores by session first:
while an engine sleeps between its steps, the loop that keeps the sidecar's core awake has the share of the engine's session,
and the sidecar waits for seconds."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    """Runs the sections, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a smoke test: too short to conclude anything")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*SECTIONS, *ELSEWHERE),
        metavar="SECTION",
        help=", ".join((*SECTIONS, *ELSEWHERE)),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the table into this page")
    parser.add_argument("--report", action="store_true", help="exit 0 also if a gate failed")
    parser.add_argument(
        "--peers-python", metavar="PATH", default=sys.executable, help="where the peers are installed"
    )
    parser.add_argument("--section", choices=(*SECTIONS, *ELSEWHERE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        lines = importlib.import_module(
            f"benchmarks.{MODULES.get(arguments.section, arguments.section)}"
        ).measure(arguments.quick)
        verdict.saved(lines, arguments.json, {})
        return 0
    before = machine.load()
    about = machine.described() | {"load average": f"{before:.2f} before"}
    lines: list[Line] = []
    broken = False
    for found in _measured(arguments.only or SECTIONS, arguments.quick, arguments.peers_python):
        lines += found or ()
        broken |= found is None
        if arguments.json:  # after each section: a run of two hours may be stopped
            verdict.saved(lines, arguments.json, about)
    show(lines, about)
    if arguments.docs:
        _write_docs(arguments.docs, lines, about)
    failed = any(one.verdict == verdict.FAIL for one in lines)
    return int(broken or (failed and not arguments.report))


def _measured(sections: list[str], quick: bool, peers_python: str) -> Iterator[list[Line] | None]:
    """The lines of one section after the other; None for one that broke off."""
    for section in sections:
        if quick and section in NOT_QUICK and len(sections) > 1:
            continue
        print(f"measuring {section} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "lines.json"
            python = peers_python if section == "peers" else sys.executable
            command = [python, "-m", "benchmarks", "--section", section, "--json", str(found)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            with contextlib.nullcontext() if section in KEEP_AWAKE_THEMSELVES else awake():
                done = subprocess.run(command + ["--quick"] * quick, env=environment)
            if done.returncode:
                print(f"{section} broke off with status {done.returncode}", file=sys.stderr)
            yield None if done.returncode else verdict.loaded(found)


def show(lines: list[Line], about: dict[str, str]) -> None:
    """The table, and under it what was measured on."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("claim", "gate", "measured", "[low, high]", "control", "verdict"):
        table.add_column(column, justify="left" if column in ("claim", "verdict") else "right")
    for row in verdict.rows_of(lines):
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)
    for one in lines:
        if one.note:
            console.print(f"  {one.claim}: {one.note}", markup=False, style="dim")
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), markup=False)


def _write_docs(page: Path, lines: list[Line], about: dict[str, str]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    old, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no {BEGIN} … {END}")
    rows = ["| claim | gate | measured | bounds | control | verdict |", "|---|---|---|---|---|---|"]
    new = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in verdict.rows_of(lines)
    ]
    rows += merged([row for row in old.splitlines() if row.startswith("| ") and row not in rows], new)
    machine_said = ", ".join(f"{name} {value}" for name, value in about.items())
    page.write_text(
        f"{before}{BEGIN}\nMeasured on: {machine_said}.\n\n" + "\n".join(rows) + f"\n{END}{after}"
    )


def merged(old: list[str], new: list[str]) -> list[str]:
    """The rows of a table with those that were measured anew in their places; one of a new claim comes after the row that it was
    measured after."""
    rows, place = list(old), len(old)
    places = {row.split(" | ")[0]: number for number, row in enumerate(rows)}
    added: dict[int, list[str]] = {}
    for row in new:
        known = places.get(row.split(" | ")[0])
        if known is None:
            added.setdefault(place, []).append(row)
        else:
            rows[known], place = row, known + 1
    return [
        row for number in range(len(rows) + 1) for row in (*added.get(number, ()), *rows[number : number + 1])
    ]


if __name__ == "__main__":
    sys.exit(main())
