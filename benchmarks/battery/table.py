"""Prints the confusion table of the battery, and its bars."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from benchmarks.battery.faults import FAULTS

MACRO, SERVER, FAULT, ALARMS = 0.90, 0.80, 0.70, 0.05
HEALTHY = ("nothing", "nothing, busy machine")


def print_table(outcomes: list[dict[str, Any]]) -> int:
    """Prints, for each server and fault, the verdicts of its draws. Returns 0 if every bar holds, else 1."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        cells[outcome["server"], outcome["fault"]].append(outcome)
    recalls = {cell: _share_right(drawn) for cell, drawn in cells.items()}
    for (server, fault), drawn in sorted(cells.items()):
        named = ", ".join(
            f"{verdict} {count}" for verdict, count in Counter(one["verdict"] for one in drawn).most_common()
        )
        print(f"{server:<20}{fault:<24}{recalls[server, fault]:>5.0%}  {named}")
    faulty = {cell: recall for cell, recall in recalls.items() if cell[1] not in HEALTHY}
    healthy = [one for one in outcomes if one["fault"] in HEALTHY]
    alarms = sum(not one["right"] for one in healthy) / max(len(healthy), 1)
    bars = [("macro recall", _mean(faulty.values()), MACRO, True), ("false alarms", alarms, ALARMS, False)]
    for position, bar in ((0, SERVER), (1, FAULT)):
        for name in sorted({cell[position] for cell in faulty}):
            recall = _mean(recall for cell, recall in faulty.items() if cell[position] == name)
            bars.append((name, recall, bar, True))
    failed = 0
    for name, value, bar, at_least in bars:
        holds = value >= bar if at_least else value <= bar
        failed += not holds
        print(f"{name:<30}{value:>6.0%}  {'≥' if at_least else '≤'} {bar:.0%}  {'pass' if holds else 'fail'}")
    return int(failed > 0)


def is_right(fault: str, verdict: str) -> bool:
    """Returns whether the verdict is right for the fault."""
    return verdict in FAULTS[fault].verdicts


def _share_right(drawn: list[dict[str, Any]]) -> float:
    return sum(one["right"] for one in drawn) / len(drawn)


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 1.0
