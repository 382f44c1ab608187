"""Converts the alert rules to rule groups of Grafana's provisioning API, for evaluation by Grafana. Pure.

A Prometheus alert fires while its query returns a series. As in Grafana's own converter of Prometheus rules
(grafana/pkg/services/ngalert/prom), a math step turns a number into 1, and a threshold compares that with 0.
Recorded series are replaced by their expressions, because Grafana records none. Grafana shows an alert by its
title; the title is the alert's name, followed by objective and window where the name alone is ambiguous.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

EVALUATION_INTERVAL_S = 20
"""Time between two evaluations; Grafana accepts only multiples of 10."""
_MAX_UID_LENGTH = 40
_QUERY_ID, _PRESENT_ID, _THRESHOLD_ID = "query", "there", "over"
_LOOKBACK_S = 600


def convert_rule_groups(rules: Mapping[str, Any], datasource: str) -> list[dict[str, Any]]:
    """Returns Grafana rule groups (title, interval in s, rules) for a rules file.

    `rules`: the file's content. `datasource`: uid of the Prometheus data source.
    """
    recorded = {
        rule["record"]: rule["expr"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "record" in rule and "labels" not in rule
    }
    groups = []
    for group in rules["groups"]:
        alerts = [rule for rule in group["rules"] if "alert" in rule]
        converted = [_convert_rule(rule, recorded, datasource) for rule in alerts]
        if converted:
            groups.append({"title": group["name"], "interval": EVALUATION_INTERVAL_S, "rules": converted})
    return groups


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
    uid = re.sub(r"[^a-z0-9-]", "-", f"oi-{title}".lower())
    if len(uid) <= _MAX_UID_LENGTH:
        return uid
    return f"{uid[: _MAX_UID_LENGTH - 9]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def _inline_recorded_series(expr: str, recorded: Mapping[str, str]) -> str:
    return re.sub(
        r"[a-zA-Z_:][\w:]*", lambda name: f"({recorded[name[0]]})" if name[0] in recorded else name[0], expr
    )


def _convert_template(text: str) -> str:
    """Returns a template in Grafana's syntax, where the value has the name of its query."""
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
    is_present = " || ".join(f"{test}(${_QUERY_ID})" for test in ("is_number", "is_nan", "is_inf"))
    return _expression_step(_PRESENT_ID, {"type": "math", "expression": is_present})


def _threshold_step() -> dict[str, Any]:
    condition = {"evaluator": {"type": "gt", "params": [0]}}
    return _expression_step(
        _THRESHOLD_ID, {"type": "threshold", "expression": _PRESENT_ID, "conditions": [condition]}
    )


def _expression_step(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "refId": name,
        "datasourceUid": "__expr__",
        "queryType": "",
        "relativeTimeRange": {"from": _LOOKBACK_S, "to": 0},
        "model": {"refId": name, "datasource": {"type": "__expr__", "uid": "__expr__"}, **model},
    }
