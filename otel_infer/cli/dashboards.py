"""Grafana dashboards, built from the metric names of this release.

otel-infer dashboards build --out DIR             write them as files, for provisioning
otel-infer dashboards build --check DIR           check whether the files in DIR are those of this release
otel-infer dashboards push --grafana URL          push them to a Grafana
otel-infer dashboards diff --grafana URL          show how those in Grafana differ
otel-infer dashboards pull --grafana URL --out D  write those in Grafana as files
otel-infer dashboards check --prometheus URL      show which panels have data, which not, and why

GRAFANA_TOKEN holds a token, or user:password.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_infer.cli import grafana, prometheus_check
from otel_infer.monitoring import dashboards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `dashboards`."""
    subcommands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    build = subcommands.add_parser("build", help="write them as files, or check files")
    prometheus_check.add_histograms_argument(build)
    target = build.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="DIR", help="write them to DIR")
    target.add_argument("--check", metavar="DIR", help="write nothing; exit with 1 if a file in DIR differs")
    for name, summary in (
        ("push", "push them to a Grafana"),
        ("diff", "show how those in Grafana differ"),
        ("pull", "write those in Grafana as files"),
    ):
        subparser = subcommands.add_parser(name, help=summary)
        grafana.add_arguments(subparser, writes=name == "push")
        if name != "pull":
            prometheus_check.add_histograms_argument(subparser)
        if name == "push":
            subparser.add_argument(
                "--force",
                action="store_true",
                help="also overwrite dashboards with our uids that otel-infer did not write",
            )
        if name == "pull":
            subparser.add_argument("--out", metavar="DIR", required=True, help="write them to DIR")
    check = subcommands.add_parser("check", help="show which panels have data, which not, and why")
    prometheus_check.add_arguments(check)
    prometheus_check.add_histograms_argument(check)
    check.add_argument("--window", metavar="5m", default="5m", help="the window of rates (5m)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand.

    Returns 1 if a check found a difference or an error, 2 if it could not run, else 0.
    """
    boards = prometheus_check.convert_histograms(arguments, dashboards.build_dashboards())
    if arguments.what == "build":
        return (
            _check_dashboards(boards, Path(arguments.check))
            if arguments.check
            else _write_dashboards(boards, Path(arguments.out))
        )
    if arguments.what == "check":
        return prometheus_check.print_panels(arguments, boards)
    return grafana.run_dashboards_command(arguments, {str(board["uid"]): board for board in boards.values()})


def dashboard_to_json(board: Mapping[str, Any]) -> str:
    """Returns the text of a dashboard's file."""
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def _write_dashboards(boards: Mapping[str, Any], folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, board in boards.items():
            (folder / name).write_text(dashboard_to_json(board), encoding="utf-8")
            print(folder / name)
    except OSError as reason:
        print(f"otel-infer dashboards: {reason}", file=sys.stderr)
        return 2
    return 0


def _check_dashboards(boards: Mapping[str, Any], folder: Path) -> int:
    stale = [name for name, board in boards.items() if _read_text(folder / name) != dashboard_to_json(board)]
    for name in stale:
        print(f"{folder / name}: not of this release; run otel-infer dashboards build --out {folder}")
    return 1 if stale else 0


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
