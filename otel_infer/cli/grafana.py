"""The parts of `dashboards` and `alerts` that use a running Grafana."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from otel_infer.config import environment
from otel_infer.monitoring.grafana.client import GrafanaChange, GrafanaClient, GrafanaError

TITLE = "otel_infer"
MAX_PATHS = 5


def add_arguments(parser: argparse.ArgumentParser, *, writes: bool) -> None:
    """Adds the options that select a Grafana, and `--dry-run` for a command that writes."""
    parser.add_argument(
        "--grafana",
        metavar="URL",
        required=True,
        help="its address; GRAFANA_TOKEN holds a token, or user:password",
    )
    if writes:
        parser.add_argument("--dry-run", action="store_true", help="print the changes without making them")


def run_dashboards_command(arguments: argparse.Namespace, boards: Mapping[str, dict[str, Any]]) -> int:
    """Runs `push`, `diff` or `pull`.

    Returns 1 if `diff` finds a difference, 2 if Grafana rejects a call, else 0.
    """
    try:
        grafana = GrafanaClient(arguments.grafana, environment.grafana_token())
        if arguments.what == "push":
            return _push_dashboards(grafana, arguments, boards)
        if arguments.what == "diff":
            return _diff_dashboards(grafana, boards)
        return _pull_dashboards(grafana, boards, Path(arguments.out))
    except (GrafanaError, OSError) as error:
        print(f"otel-infer dashboards: {error}", file=sys.stderr)
        return 2


def push_alerts(arguments: argparse.Namespace, make_groups: Callable[[str], list[dict[str, Any]]]) -> int:
    """Pushes the alert rules. `make_groups`: returns the rule groups for the uid of a data source."""
    try:
        grafana = GrafanaClient(arguments.grafana, environment.grafana_token())
        source = grafana.select_datasources(prometheus=arguments.datasource).prometheus
        print(f"data source: {source.name} ({source.uid})")
        _print_changes(
            grafana.push_rules(make_groups(source.uid), TITLE, dry_run=arguments.dry_run), arguments.dry_run
        )
    except GrafanaError as error:
        print(f"otel-infer alerts: {error}", file=sys.stderr)
        return 2
    return 0


def _push_dashboards(
    grafana: GrafanaClient, arguments: argparse.Namespace, boards: Mapping[str, dict[str, Any]]
) -> int:
    sources = grafana.select_datasources()
    tempo = f"traces of {sources.tempo.name}" if sources.tempo else "no Tempo: exemplars have no link"
    print(f"metrics of {sources.prometheus.name}; {tempo}")
    _print_changes(
        grafana.push_dashboards(boards, TITLE, dry_run=arguments.dry_run, force=arguments.force),
        arguments.dry_run,
    )
    return 0


def _print_changes(changes: list[GrafanaChange], is_dry: bool) -> None:
    for change in changes:
        would = "would be " if is_dry and change.action != "unchanged" else ""
        print(f"{change.kind} {change.uid}: {would}{change.action}")


def _diff_dashboards(grafana: GrafanaClient, boards: Mapping[str, dict[str, Any]]) -> int:
    differences = grafana.diff_dashboards(boards)
    for difference in differences:
        print(f"{difference.uid}: {difference.state}")
        for path in difference.differing_paths[:MAX_PATHS]:
            print(f"  {path}")
        if len(difference.differing_paths) > MAX_PATHS:
            print(f"  and {len(difference.differing_paths) - MAX_PATHS} more")
    return 0 if all(difference.state == "same" for difference in differences) else 1


def _pull_dashboards(grafana: GrafanaClient, boards: Mapping[str, dict[str, Any]], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    names = {uid: uid.removeprefix("otel-infer-") + ".json" for uid in boards}
    for uid, board in grafana.pull_dashboards(boards).items():
        file = folder / names[uid]
        file.write_text(json.dumps(board, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(file)
    return 0
