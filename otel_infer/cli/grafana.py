"""What `dashboards` and `alerts` do with a running Grafana."""

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
    """Which Grafana, and how much of it."""
    parser.add_argument(
        "--grafana",
        metavar="URL",
        required=True,
        help="where it answers; a token, or user:password, is in GRAFANA_TOKEN",
    )
    if writes:
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run_dashboards_command(arguments: argparse.Namespace, boards: Mapping[str, dict[str, Any]]) -> int:
    """`push`, `diff` or `pull`; 1 where `diff` finds something, 2 where Grafana refuses."""
    try:
        grafana = GrafanaClient(arguments.grafana, environment.grafana_token())
        if arguments.what == "push":
            return _push_dashboards(grafana, arguments, boards)
        if arguments.what == "diff":
            return _diff_dashboards(grafana, boards)
        return _pull_dashboards(grafana, boards, Path(arguments.out))
    except (GrafanaError, OSError) as refusal:
        print(f"otel-infer dashboards: {refusal}", file=sys.stderr)
        return 2


def push_alerts(arguments: argparse.Namespace, made: Callable[[str], list[dict[str, Any]]]) -> int:
    """`push`; `made`: rule groups that ask the data source with this uid."""
    try:
        grafana = GrafanaClient(arguments.grafana, environment.grafana_token())
        source = grafana.select_datasources(prometheus=arguments.datasource).prometheus
        print(f"asks {source.name} ({source.uid})")
        _print_changes(
            grafana.push_rules(made(source.uid), TITLE, dry_run=arguments.dry_run), arguments.dry_run
        )
    except GrafanaError as refusal:
        print(f"otel-infer alerts: {refusal}", file=sys.stderr)
        return 2
    return 0


def _push_dashboards(
    grafana: GrafanaClient, arguments: argparse.Namespace, boards: Mapping[str, dict[str, Any]]
) -> int:
    sources = grafana.select_datasources()
    tempo = f"traces of {sources.tempo.name}" if sources.tempo else "no Tempo: exemplars lead nowhere"
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
    found = grafana.diff_dashboards(boards)
    for one in found:
        print(f"{one.uid}: {one.state}")
        for path in one.differing_paths[:MAX_PATHS]:
            print(f"  {path}")
        if len(one.differing_paths) > MAX_PATHS:
            print(f"  and {len(one.differing_paths) - MAX_PATHS} more")
    return 0 if all(one.state == "same" for one in found) else 1


def _pull_dashboards(grafana: GrafanaClient, boards: Mapping[str, dict[str, Any]], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    names = {uid: uid.removeprefix("otel-infer-") + ".json" for uid in boards}
    for uid, board in grafana.pull_dashboards(boards).items():
        file = folder / names[uid]
        file.write_text(json.dumps(board, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(file)
    return 0
