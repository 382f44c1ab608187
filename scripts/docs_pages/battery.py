"""The tables of the battery in docs/explain.md, from what `python -m benchmarks.battery --publish` and its `advice` write."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.battery.faults import FAULTS
from benchmarks.battery.servers import SERVERS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "battery.json"
ADVICE = RESULTS.with_name("battery_advice.json")


def build_battery_section(results: Path = RESULTS) -> str:
    """Returns a table: for each fault its right verdicts, and for each server the verdicts of its draws."""
    if not results.exists():
        return "There is no table yet: no result is committed.\n"
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in json.loads(results.read_text()):
        cells[outcome["fault"], outcome["server"]].append(outcome)
    names = [name for name in SERVERS if any(server == name for _, server in cells)]
    lines = [
        f"| fault | right | {' | '.join(SERVERS[name].title for name in names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for fault, row in FAULTS.items():
        if any((fault, name) in cells for name in names):
            shown = [_format_cell(cells.get((fault, name), [])) for name in names]
            lines.append(
                f"| {fault} | {', '.join(f'`{verdict}`' for verdict in row.verdicts)} | {' | '.join(shown)} |"
            )
    absent = [SERVERS[name].title for name in SERVERS if name not in names]
    note = f"\nNot drawn yet: {', '.join(absent)}.\n" if absent else ""
    return "\n".join(lines) + "\n" + note


def build_advice_section(results: Path = ADVICE) -> str:
    """Returns a table: for each fault the change, and for each server how far the p99 of the cause fell."""
    if not results.exists():
        return "There is no table yet: no result is committed.\n"
    rows = json.loads(results.read_text())
    names = [name for name in SERVERS if any(row["server"] == name for row in rows)]
    lines = [
        f"| fault | change | {' | '.join(SERVERS[name].title for name in names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        by_server = {row["server"]: row for row in rows if row["fault"] == fault}
        shown = [_format_fall(by_server.get(name)) for name in names]
        advice = next(iter(by_server.values()))["advice"]
        lines.append(f"| {fault} | {advice} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _format_fall(row: dict[str, Any] | None) -> str:
    return "—" if row is None else f"`{row['cause']}` {row['before_ms']:.0f} → {row['after_ms']:.0f} ms"


def _format_cell(outcomes: list[dict[str, Any]]) -> str:
    """Returns right of all draws, and the wrong verdicts."""
    if not outcomes:
        return "—"
    wrong = Counter(outcome["verdict"] for outcome in outcomes if not outcome["right"])
    named = ", ".join(f"`{verdict}`" for verdict in wrong)
    return f"{len(outcomes) - wrong.total()} of {len(outcomes)}" + (f" (else {named})" if wrong else "")
