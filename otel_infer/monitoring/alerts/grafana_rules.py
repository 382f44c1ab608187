"""The same alerts for who has Grafana evaluate them: rule groups of its provisioning API. Pure.

Each is a query that answers while the alert fires, much as in Grafana's own converter of Prometheus rules
(grafana/pkg/services/ngalert/prom): a number that is there is turned into 1, and 1 is more than 0. What Prometheus would record is
written out in the queries that use it. Grafana calls an alert by its title, so that is its name and, where several have that, which.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

EVALUATED_S = 20
"""Seconds between two evaluations: Grafana refuses what is no multiple of 10."""
_LONGEST_UID = 40
_QUERY, _THERE, _OVER = "query", "there", "over"
_LOOK_BACK_S = 600


def groups(rules: Mapping[str, Any], datasource: str) -> list[dict[str, Any]]:
    """From the file's content, for the Prometheus data source with this uid: title, interval (s), rules."""
    recorded = {
        rule["record"]: rule["expr"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "record" in rule and "labels" not in rule
    }
    found = []
    for group in rules["groups"]:
        alerts = [rule for rule in group["rules"] if "alert" in rule]
        made = [_rule(rule, recorded, datasource) for rule in alerts]
        if made:
            found.append({"title": group["name"], "interval": EVALUATED_S, "rules": made})
    return found


def _rule(rule: Mapping[str, Any], recorded: Mapping[str, str], datasource: str) -> dict[str, Any]:
    labels = rule["labels"]
    title = " ".join([rule["alert"], *(labels[key] for key in ("slo", "long") if key in labels)])
    return {
        "uid": _uid(title),
        "title": title,
        "condition": _OVER,
        "data": [_query(_written_out(rule["expr"], recorded), datasource), _math(), _threshold()],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "keep_firing_for": rule.get("keep_firing_for", "0s"),
        "labels": dict(labels),
        "annotations": {key: _template(text) for key, text in rule["annotations"].items()},
        "isPaused": False,
    }


def _uid(title: str) -> str:
    whole = re.sub(r"[^a-z0-9-]", "-", f"oi-{title}".lower())
    if len(whole) <= _LONGEST_UID:
        return whole
    return f"{whole[: _LONGEST_UID - 9]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def _written_out(expr: str, recorded: Mapping[str, str]) -> str:
    return re.sub(
        r"[a-zA-Z_:][\w:]*", lambda name: f"({recorded[name[0]]})" if name[0] in recorded else name[0], expr
    )


def _template(text: str) -> str:
    """Grafana has the value under the name of its query."""
    return text.replace("$value", f"$values.{_QUERY}.Value")


def _query(expr: str, datasource: str) -> dict[str, Any]:
    return {
        "refId": _QUERY,
        "datasourceUid": datasource,
        "queryType": "",
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "model": {"refId": _QUERY, "expr": expr, "instant": True, "range": False, "editorMode": "code"},
    }


def _math() -> dict[str, Any]:
    there = " || ".join(f"{test}(${_QUERY})" for test in ("is_number", "is_nan", "is_inf"))
    return _expression(_THERE, {"type": "math", "expression": there})


def _threshold() -> dict[str, Any]:
    over = {"evaluator": {"type": "gt", "params": [0]}}
    return _expression(_OVER, {"type": "threshold", "expression": _THERE, "conditions": [over]})


def _expression(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "refId": name,
        "datasourceUid": "__expr__",
        "queryType": "",
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "model": {"refId": name, "datasource": {"type": "__expr__", "uid": "__expr__"}, **model},
    }
