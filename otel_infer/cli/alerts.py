"""Alerts from one file of promises, and on causes; rules for Prometheus, or for Grafana to evaluate.

otel-infer alerts build slo.yaml --out rules.yml             for Prometheus, Mimir, Thanos, the operator
otel-infer alerts build slo.yaml --format grafana            for Grafana's provisioning API
otel-infer alerts push slo.yaml --grafana URL                into a Grafana; a token, or user:password, is in GRAFANA_TOKEN
otel-infer alerts test slo.yaml --prometheus URL             which rules have data, which not, and why

Without slo.yaml, each for 99 %: TTFT within 500 ms, gaps between tokens within 50 ms, requests within 40.96 s; errors below 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from otel_infer.cli import grafana, prometheus_check
from otel_infer.monitoring.alerts import burn_rate_rules, grafana_rules, slo_spec

PROMETHEUS, GRAFANA = "prometheus", "grafana"
DEFAULT_DATASOURCE = "prometheus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `alerts`."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    build = what.add_parser("build", help="write the rules")
    build.add_argument(
        "--format", choices=(PROMETHEUS, GRAFANA), default=PROMETHEUS, help="who evaluates them (prometheus)"
    )
    build.add_argument(
        "--datasource",
        metavar="UID",
        default=DEFAULT_DATASOURCE,
        help="of the data source, for grafana (prometheus)",
    )
    build.add_argument("--out", metavar="FILE", help="where to; by default it is printed")
    push = what.add_parser("push", help="into a Grafana")
    push.add_argument(
        "--datasource", metavar="UID", default="", help="of the data source; by default the only one there is"
    )
    grafana.add_arguments(push, writes=True)
    test = what.add_parser("test", help="which rules have data, which not, and why")
    prometheus_check.add_arguments(test)
    for one in (build, push, test):
        one.add_argument("slo", nargs="?", metavar="slo.yaml", help="what is promised")


def run(arguments: argparse.Namespace) -> int:
    """Does it; 2 where it cannot be done."""
    try:
        made = burn_rate_rules.build_rule_groups(_read_slo_spec(arguments.slo))
        if arguments.what == "build":
            return _write_rules(arguments, made)
    except BrokenPipeError:
        raise
    except (slo_spec.InvalidSloSpec, OSError) as reason:
        print(f"otel-infer alerts: {reason}", file=sys.stderr)
        return 2
    if arguments.what == "test":
        return prometheus_check.print_rules(arguments, made)
    return grafana.push_alerts(
        arguments, lambda datasource: grafana_rules.convert_rule_groups(made, datasource)
    )


def rules_to_yaml(made: Any) -> str:
    """Rules as YAML."""
    dumped: str = _import_yaml().safe_dump(made, sort_keys=False, width=1000, allow_unicode=True)
    return f"# made by otel-infer alerts build; do not edit\n{dumped}"


def _write_rules(arguments: argparse.Namespace, made: Any) -> int:
    if arguments.format == GRAFANA:
        content = (
            json.dumps(
                grafana_rules.convert_rule_groups(made, arguments.datasource), indent=2, ensure_ascii=False
            )
            + "\n"
        )
    else:
        content = rules_to_yaml(made)
    if arguments.out:
        Path(arguments.out).write_text(content, encoding="utf-8")
    else:
        print(content, end="")
    return 0


def _read_slo_spec(path: str | None) -> slo_spec.SloSpec:
    if path is None:
        return slo_spec.DEFAULT_SPEC
    yaml = _import_yaml()
    try:
        return slo_spec.parse_spec(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except slo_spec.InvalidSloSpec as bad:
        raise slo_spec.InvalidSloSpec(f"{path}: {bad}") from None
    except (yaml.YAMLError, ValueError) as reason:  # no text, a date that does not exist
        raise slo_spec.InvalidSloSpec(f"{path} is no YAML: {reason}") from None


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise slo_spec.InvalidSloSpec(
            "reading and writing YAML needs pip install 'otel-infer[alerts]'"
        ) from None
    return yaml
