"""What a live Prometheus has for our panels and rules, printed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from otel_infer.cli.checks import panels
from otel_infer.cli.checks.panels import Asking, NoPrometheus, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which Prometheus."""
    parser.add_argument("--prometheus", metavar="URL", required=True, help="where it answers")
    parser.add_argument("--all", action="store_true", help="also those that have data")


def print_panels(arguments: argparse.Namespace) -> int:
    """1 if a query is refused, 2 if nobody answers."""
    return _printed(arguments, lambda ask: panels.of_panels(ask, arguments.window))


def print_rules(arguments: argparse.Namespace, rules: Mapping[str, Any]) -> int:
    """As `print_panels`."""
    return _printed(arguments, lambda ask: panels.of_rules(ask, rules))


def _printed(arguments: argparse.Namespace, look: Callable[[Asking], Iterator[Verdict]]) -> int:
    found: Counter[str] = Counter()
    try:
        for verdict in look(Asking(arguments.prometheus)):
            found[verdict.found] += 1
            if arguments.all or verdict.found != panels.DATA:
                print(f"{verdict.found:6} {verdict.where}" + (f": {verdict.why}" if verdict.why else ""))
    except NoPrometheus as reason:
        print(f"otel-infer: {reason}", file=sys.stderr)
        return 2
    print(f"{found[panels.DATA]} with data, {found[panels.EMPTY]} empty, {found[panels.ERROR]} refused")
    return 1 if found[panels.ERROR] else 0
