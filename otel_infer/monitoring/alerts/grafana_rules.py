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

EVALUATION_INTERVAL_S = 20
"""Seconds between two evaluations: Grafana refuses what is no multiple of 10."""
_MAX_UID_LENGTH = 40
_QUERY_ID, _PRESENT_ID, _THRESHOLD_ID = "query", "there", "over"
_LOOKBACK_S = 600


def convert_rule_groups(rules: Mapping[str, Any], datasource: str) -> list[dict[str, Any]]:
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
        made = [_convert_rule(rule, recorded, datasource) for rule in alerts]
        if made:
            found.append({"title": group["name"], "interval": EVALUATION_INTERVAL_S, "rules": made})
    return found


def _convert_rule(rule: Mapping[str, Any], recorded: Mapping[str, str], datasource: str) -> dict[str, Any]:
    labels = rule["labels"]
    title = " ".join([rule["alert"], *(labels[key] for key in ("slo", "long") if key in labels)])
    return {
        "uid": _rule_uid(title),
        "title": title,
        "condition": _THRESHOLD_ID,
        "data": [
            _query_step(_inline_recorded_series(rule["expr"], recorded), datasource),
            _math_step(),
            _threshold_step(),
        ],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "keep_firing_for": rule.get("keep_firing_for", "0s"),
        "labels": dict(labels),
        "annotations": {key: _convert_template(text) for key, text in rule["annotations"].items()},
        "isPaused": False,
    }


def _rule_uid(title: str) -> str:
    whole = re.sub(r"[^a-z0-9-]", "-", f"oi-{title}".lower())
    if len(whole) <= _MAX_UID_LENGTH:
        return whole
    return f"{whole[: _MAX_UID_LENGTH - 9]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def _inline_recorded_series(expr: str, recorded: Mapping[str, str]) -> str:
    return re.sub(
        r"[a-zA-Z_:][\w:]*", lambda name: f"({recorded[name[0]]})" if name[0] in recorded else name[0], expr
    )


def _convert_template(text: str) -> str:
    """Grafana has the value under the name of its query."""
    return text.replace("$value", f"$values.{_QUERY_ID}.Value")


def _query_step(expr: str, datasource: str) -> dict[str, Any]:
    return {
        "refId": _QUERY_ID,
        "datasourceUid": datasource,
        "queryType": "",
        "relativeTimeRange": {"from": _LOOKBACK_S, "to": 0},
        "model": {"refId": _QUERY_ID, "expr": expr, "instant": True, "range": False, "editorMode": "code"},
    }


def _math_step() -> dict[str, Any]:
    there = " || ".join(f"{test}(${_QUERY_ID})" for test in ("is_number", "is_nan", "is_inf"))
    return _expression_step(_PRESENT_ID, {"type": "math", "expression": there})


def _threshold_step() -> dict[str, Any]:
    over = {"evaluator": {"type": "gt", "params": [0]}}
    return _expression_step(
        _THRESHOLD_ID, {"type": "threshold", "expression": _PRESENT_ID, "conditions": [over]}
    )


def _expression_step(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "refId": name,
        "datasourceUid": "__expr__",
        "queryType": "",
        "relativeTimeRange": {"from": _LOOKBACK_S, "to": 0},
        "model": {"refId": name, "datasource": {"type": "__expr__", "uid": "__expr__"}, **model},
    }
