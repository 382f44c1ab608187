"""Alert rules on the objectives in a file and on causes of latency, for Prometheus or Grafana.

otel-infer alerts build slo.yaml --out rules.yml             for Prometheus, Mimir, Thanos
otel-infer alerts build slo.yaml --format grafana            for Grafana's provisioning API
otel-infer alerts push slo.yaml --grafana URL                push to a Grafana; for the login see GRAFANA_TOKEN
otel-infer alerts test slo.yaml --prometheus URL             show which rules have data, which not, and why

Default objectives, each for 99 %: TTFT within 500 ms, ITL within 50 ms, requests within 40.96 s. Errors:
below 0.5 %. GRAFANA_TOKEN holds a token, or user:password.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from otel_infer.cli import grafana, prometheus_check
from otel_infer.cli.errors import CommandError
from otel_infer.monitoring.alerts import burn_rate_rules, grafana_rules, slo_spec

PROMETHEUS, GRAFANA = "prometheus", "grafana"
DEFAULT_DATASOURCE = "prometheus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `alerts`."""
    subcommands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    build = subcommands.add_parser("build", help="write the rules")
    build.add_argument(
        "--format",
        choices=(PROMETHEUS, GRAFANA),
        default=PROMETHEUS,
        help="the system that evaluates them (prometheus)",
    )
    build.add_argument(
        "--datasource",
        metavar="UID",
        default=DEFAULT_DATASOURCE,
        help="uid of the data source, for grafana (prometheus)",
    )
    build.add_argument("--out", metavar="FILE", help="the file to write; default: print the rules")
    push = subcommands.add_parser("push", help="push the rules to a Grafana")
    push.add_argument(
        "--datasource", metavar="UID", default="", help="uid of the data source; default: the only one"
    )
    grafana.add_arguments(push, writes=True)
    test = subcommands.add_parser("test", help="show which rules have data, which not, and why")
    prometheus_check.add_arguments(test)
    for subparser in (build, push, test):
        prometheus_check.add_histograms_argument(subparser)
        subparser.add_argument("slo", nargs="?", metavar="slo.yaml", help="the objectives")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand. Returns 2 if it could not run, 1 if `test` found a rejected query, else 0."""
    try:
        groups = burn_rate_rules.build_rule_groups(_read_slo_spec(arguments.slo))
        groups = prometheus_check.convert_histograms(arguments, groups)
        if arguments.what == "build":
            return _write_rules(arguments, groups)
    except BrokenPipeError:
        raise
    except (slo_spec.InvalidSloSpec, OSError) as reason:
        print(f"otel-infer alerts: {reason}", file=sys.stderr)
        return 2
    if arguments.what == "test":
        return prometheus_check.print_rules(arguments, groups)
    return grafana.push_alerts(
        arguments, lambda datasource: grafana_rules.convert_rule_groups(groups, datasource)
    )


def rules_to_yaml(rules: Any) -> str:
    """Returns the rules as YAML."""
    dumped: str = _import_yaml().safe_dump(rules, sort_keys=False, width=1000, allow_unicode=True)
    return f"# made by otel-infer alerts build; do not edit\n{dumped}"


def _write_rules(arguments: argparse.Namespace, groups: Any) -> int:
    if arguments.format == GRAFANA:
        content = (
            json.dumps(
                grafana_rules.convert_rule_groups(groups, arguments.datasource), indent=2, ensure_ascii=False
            )
            + "\n"
        )
    else:
        content = rules_to_yaml(groups)
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
    except slo_spec.InvalidSloSpec as error:
        raise slo_spec.InvalidSloSpec(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as reason:  # e.g. not UTF-8, or an invalid date
        raise slo_spec.InvalidSloSpec(f"{path} is not valid YAML: {reason}") from None


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise CommandError("YAML support is not installed; run pip install 'otel-infer[alerts]'") from None
    return yaml
