"""Prints the dashboards as ConfigMaps and the alert rules as PrometheusRules, for `kubectl apply --server-side -f -`.

    python examples/kubernetes/dashboards_and_rules.py | kubectl apply --server-side -f -

Not kustomize: it reads no file outside its own folder, and has no way to put a rule file into a PrometheusRule; copies kept here
would go stale. Server-side, since a dashboard is too large for the annotation that `kubectl apply` keeps otherwise.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

DASHBOARDS = Path(__file__).parents[2] / "dashboards"


def documents(folder: Path, namespace: str, labels: dict[str, str]) -> Iterator[str]:
    """One YAML document for each dashboard and each file of rules; `labels` are what your operator selects rules by."""
    for path in sorted(folder.glob("*.json")):
        yield _document(
            "v1",
            "ConfigMap",
            {"name": _name(path), "namespace": namespace, "labels": {"grafana_dashboard": "1"}},
            f"data: {json.dumps({path.name: path.read_text(encoding='utf-8')})}",
        )
    for path in sorted((folder / "alerts").glob("*.rules.yml")):
        yield _document(
            "monitoring.coreos.com/v1",
            "PrometheusRule",
            {"name": _name(path), "namespace": namespace, "labels": labels},
            "spec:\n" + textwrap.indent(path.read_text(encoding="utf-8"), "  "),
        )


def _document(version: str, kind: str, metadata: dict[str, object], rest: str) -> str:
    return f"---\napiVersion: {version}\nkind: {kind}\nmetadata: {json.dumps(metadata)}\n{rest.rstrip()}"


def _name(path: Path) -> str:
    stem = path.name.partition(".")[0].replace("_", "-")
    return stem if stem.startswith("otel-infer") else f"otel-infer-{stem}"


def main() -> None:
    """Prints all of them."""
    parser = argparse.ArgumentParser(description="Dashboards and alert rules as objects of Kubernetes.")
    parser.add_argument(
        "--namespace", default="monitoring", help="where Grafana and Prometheus look (monitoring)"
    )
    parser.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="on each PrometheusRule"
    )
    arguments = parser.parse_args()
    labels = dict(label.split("=", 1) for label in arguments.label)
    for document in documents(DASHBOARDS, arguments.namespace, labels):
        print(document)


if __name__ == "__main__":
    main()
