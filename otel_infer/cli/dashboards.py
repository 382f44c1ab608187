"""The dashboards for Grafana, made from the names that this release emits.

otel-infer dashboards build --out DIR             write them as files, for provisioning
otel-infer dashboards build --check DIR           whether the files there are those of this release
otel-infer dashboards push --grafana URL          into a Grafana; a token, or user:password, is in GRAFANA_TOKEN
otel-infer dashboards diff --grafana URL          what is different there
otel-infer dashboards pull --grafana URL --out D  what is there, as files
otel-infer dashboards check --prometheus URL      which panels have data, which not, and why
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
    """The subcommands of `dashboards`."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    build = what.add_parser("build", help="write them as files, or compare")
    where = build.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", metavar="DIR", help="write them here")
    where.add_argument(
        "--check", metavar="DIR", help="write nothing: 1 if a file here is not what would be written"
    )
    for name, says in (
        ("push", "into a Grafana"),
        ("diff", "what is different there"),
        ("pull", "as they are there"),
    ):
        one = what.add_parser(name, help=says)
        grafana.add_arguments(one, writes=name == "push")
        if name == "push":
            one.add_argument(
                "--force", action="store_true", help="also over what has our uid and is not ours"
            )
        if name == "pull":
            one.add_argument("--out", metavar="DIR", required=True, help="write them here")
    check = what.add_parser("check", help="which panels have data, which not, and why")
    prometheus_check.add_arguments(check)
    check.add_argument("--window", metavar="5m", default="5m", help="over which rates are taken (5m)")


def run(arguments: argparse.Namespace) -> int:
    """Does it; 1 where something is not as it should be, 2 where it cannot be done."""
    if arguments.what == "build":
        return (
            _check_dashboards(Path(arguments.check))
            if arguments.check
            else _write_dashboards(Path(arguments.out))
        )
    if arguments.what == "check":
        return prometheus_check.print_panels(arguments)
    return grafana.run_dashboards_command(arguments, _dashboards_by_uid())


def dashboard_to_json(board: Mapping[str, Any]) -> str:
    """A dashboard as it is written to a file."""
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def _dashboards_by_uid() -> dict[str, dict[str, Any]]:
    return {str(board["uid"]): board for board in dashboards.build_dashboards().values()}


def _write_dashboards(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, board in dashboards.build_dashboards().items():
            (folder / name).write_text(dashboard_to_json(board), encoding="utf-8")
            print(folder / name)
    except OSError as reason:
        print(f"otel-infer dashboards: {reason}", file=sys.stderr)
        return 2
    return 0


def _check_dashboards(folder: Path) -> int:
    stale = [
        name
        for name, board in dashboards.build_dashboards().items()
        if _read_text(folder / name) != dashboard_to_json(board)
    ]
    for name in stale:
        print(f"{folder / name}: not what this release makes; otel-infer dashboards build --out {folder}")
    return 1 if stale else 0


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
