"""Runs the benchmarks and prints one table: claim, gate, measured, control, verdict.

    python -m benchmarks [--quick] [--only SECTION …] [--json FILE] [--docs FILE] [--report] [--peers-python PATH]
                         [--servers NAME …]

Exit status 1 if a gate failed (0 with --report). INCONCLUSIVE is neither a pass nor a failure: repeat that section on
an idle machine.
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
from benchmarks.awake import keep_awake
from benchmarks.verdict import Line

SECTIONS = (
    "hooks",
    "simulated_loop",
    "transformers_loop",
    "throughput",
    "transformers_scheduler",
    "sidecar",
    "asgi",
    "peers",
    "slow_collector",
    "memory",
    "truth",
    "blocked_truth",
)
ONLY_IF_NAMED = (
    "vllm_scheduler", "vllm", "whole", "server_truth", "entrances", "engine_truth", "engine_hooks",
    "sglang_tracers",
)  # fmt: skip
"""Sections that run only if `--only` names them: seven have a Python environment of their own, one takes hours."""
MODULES = {
    "asgi": "asgi_requests",
    "entrances": "entrance_requests",
    "sidecar": "sidecar_load",
    "vllm": "vllm_serving",
    "whole": "whole.section",
    "server_truth": "server_truth.section",
}
HAS_SERVERS = ("whole", "server_truth")
EXCLUDED_FROM_QUICK = ("truth", "blocked_truth")
KEEPS_OWN_CORES_AWAKE = ("slow_collector", "simulated_loop")
"""Sections that choose which cores are kept awake. The simulated loop never sleeps, and a loop on its core would delay
it by a tick at times. Beside the slow collector there is none: the loop would get the share of the sleeping engine's
session, and the sidecar would wait for seconds."""
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def main() -> int:
    """Runs each section in a separate process and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a smoke test, too short for a conclusion")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*SECTIONS, *ONLY_IF_NAMED),
        metavar="SECTION",
        help=", ".join((*SECTIONS, *ONLY_IF_NAMED)),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into this page")
    parser.add_argument("--report", action="store_true", help="exit 0 also if a gate failed")
    parser.add_argument(
        "--peers-python", metavar="PATH", default=sys.executable, help="the interpreter with the peers"
    )
    parser.add_argument(
        "--servers",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the servers of the sections whole and server_truth",
    )
    parser.add_argument("--section", choices=(*SECTIONS, *ONLY_IF_NAMED), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        module = importlib.import_module(f"benchmarks.{MODULES.get(arguments.section, arguments.section)}")
        options = {"servers": arguments.servers} if arguments.section in HAS_SERVERS else {}
        lines = module.measure(arguments.quick, **options)
        verdict.save_lines(lines, arguments.json, {})
        return 0
    before = machine.read_load()
    environment = machine.describe_machine() | {"load average": f"{before:.2f} before"}
    lines: list[Line] = []
    broken = False
    for measured in _measure_sections(arguments):
        lines += measured or ()
        broken |= measured is None
        if arguments.json:  # after each section, because a run takes two hours
            verdict.save_lines(lines, arguments.json, environment)
    show_lines(lines, environment)
    if arguments.docs:
        _write_docs(arguments.docs, lines, environment)
    failed = any(line.verdict == verdict.FAIL for line in lines)
    return int(broken or (failed and not arguments.report))


def _measure_sections(arguments: argparse.Namespace) -> Iterator[list[Line] | None]:
    """Yields the lines of each section, or None if the section exited with an error."""
    sections, quick = arguments.only or SECTIONS, arguments.quick
    for section in sections:
        if quick and section in EXCLUDED_FROM_QUICK and len(sections) > 1:
            continue
        print(f"measuring {section} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "lines.json"
            python = arguments.peers_python if section == "peers" else sys.executable
            command = [python, "-m", "benchmarks", "--section", section, "--json", str(results)]
            command += ["--servers", *arguments.servers] * (
                section in HAS_SERVERS and bool(arguments.servers)
            )
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            with contextlib.nullcontext() if section in KEEPS_OWN_CORES_AWAKE else keep_awake():
                completed = subprocess.run(command + ["--quick"] * quick, env=variables)
            if completed.returncode:
                print(f"section {section} failed with status {completed.returncode}", file=sys.stderr)
            yield None if completed.returncode else verdict.load_lines(results)


def show_lines(lines: list[Line], environment: dict[str, str]) -> None:
    """Prints the table, the notes and the description of the machine."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("claim", "gate", "measured", "[low, high]", "control", "verdict"):
        table.add_column(column, justify="left" if column in ("claim", "verdict") else "right")
    for row in verdict.format_rows(lines):
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)
    for line in lines:
        if line.note:
            console.print(f"  {line.claim}: {line.note}", markup=False, style="dim")
    console.print(", ".join(f"{name} {value}" for name, value in environment.items()), markup=False)


def _write_docs(page: Path, lines: list[Line], environment: dict[str, str]) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no {BEGIN} … {END}")
    rows = ["| claim | gate | measured | bounds | control | verdict |", "|---|---|---|---|---|---|"]
    new = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in verdict.format_rows(lines)
    ]
    rows += merge_rows([row for row in old.splitlines() if row.startswith("| ") and row not in rows], new)
    description = ", ".join(f"{name} {value}" for name, value in environment.items())
    page.write_text(f"{before}{BEGIN}\nMeasured on: {description}.\n\n" + "\n".join(rows) + f"\n{END}{after}")


def merge_rows(old: list[str], new: list[str]) -> list[str]:
    """Returns the old rows, with repeated claims replaced by the new rows. A new claim follows the row that was
    measured before it."""
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
