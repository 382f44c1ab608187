"""Prints the confusion table of the battery, and its bars."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from benchmarks.battery.faults import FAULTS

MACRO, SERVER, FAULT, ALARMS = 0.90, 0.80, 0.70, 0.05
STARVED = 0.05
MAX_UNEXPLAINED, UNEXPLAINED = 0.05, {"vllm": 0.02}
"""Share of a request's time that may be unexplained."""
MAX_REQUESTS_ABOVE = 0.05
"""Share of the requests of a server with a fault that may exceed it: the bar is one of the 95th percentile."""
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
    measured = [one for one in outcomes if "unexplained" in one]
    for server in sorted({one["server"] for one in measured}):
        shares = [
            sum(one["unexplained"] for one in drawn) / max(sum(one["requests"] for one in drawn), 1)
            for cell, drawn in cells.items()
            if cell[0] == server and all("unexplained" in one for one in drawn)
        ]
        name = f"{server}: > {UNEXPLAINED.get(server, MAX_UNEXPLAINED):.0%} unexplained"
        bars.append((name, max(shares, default=1.0), MAX_REQUESTS_ABOVE, False))
    bars.append(("verdict has the largest share", _mean(one["largest"] for one in measured), 1.0, True))
    failed = 0
    for name, value, bar, at_least in bars:
        holds = value >= bar if at_least else value <= bar
        failed += not holds
        print(f"{name:<38}{value:>6.0%}  {'≥' if at_least else '≤'} {bar:.0%}  {'pass' if holds else 'fail'}")
    return int(failed > 0)


def is_right(fault: str, report: dict[str, Any]) -> bool:
    """Returns whether the verdict of a report is right for the fault.

    Without a fault, "not enough CPU" is right where the requests waited for a core for `STARVED` of their time.
    """
    if fault in HEALTHY and report["verdict"] == "not_enough_cpu":
        return share_of_time(report, "starved") >= STARVED
    return report["verdict"] in FAULTS[fault].verdicts


def share_of_time(report: dict[str, Any], cause: str) -> float:
    """Returns the share of a cause in the time of all requests that a report lists."""
    listed = report["worst"]
    whole = sum(request["duration_ms"] for request in listed)
    return sum(request["causes_ms"].get(cause, 0.0) for request in listed) / whole if whole else 0.0


def count_unexplained(report: dict[str, Any], server: str) -> int:
    """Returns how many requests have more unexplained time than the bar of the server allows."""
    bar = UNEXPLAINED.get(server, MAX_UNEXPLAINED)
    return sum(
        request["causes_ms"].get("unexplained", 0.0) > bar * request["duration_ms"]
        for request in report["worst"]
    )


def has_largest_share(report: dict[str, Any]) -> bool:
    """Returns whether no other complaint has a larger share than the verdict."""
    weights = [finding["weight"] for finding in report["findings"]]
    return not weights or weights[0] == max(weights)


def _share_right(drawn: list[dict[str, Any]]) -> float:
    return sum(one["right"] for one in drawn) / len(drawn)


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 1.0
