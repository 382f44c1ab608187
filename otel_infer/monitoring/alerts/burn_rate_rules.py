"""Builds recording rules and alerts for Prometheus from objectives and causes. Pure: rules are dictionaries.

A burn-rate alert fires while too large a share of events is bad over a long window and also over a short one.
This is the multi-window, multi-burn-rate method of Google's SRE workbook, chapter 5. With little traffic a
single slow request would be a large share. Therefore no alert fires below a minimum number of events in the
long window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from otel_infer import semconv
from otel_infer.monitoring.alerts.cause_alerts import CAUSE_ALERTS, WATCHDOG, CauseAlert
from otel_infer.monitoring.alerts.slo_spec import (
    ERRORS,
    OBJECTIVE_METRICS,
    BurnRateWindow,
    SloObjective,
    SloSpec,
)
from otel_infer.monitoring.names import ALERT_PREFIX, UID_PREFIX
from otel_infer.monitoring.promql import PromqlBuilder, label_not_matches, ratio_or_absent, ratio_or_zero
from otel_infer.semconv import prometheus

Rule = dict[str, Any]

KEEP_FIRING = "5m"
"""How long an alert keeps firing after its condition ended, so that it does not flap."""
DEMO_SPEEDUP = 20
"""Factor by which demo windows shorten the ranges and waits of cause alerts."""
MIN_RANGE_S = 30
"""Minimum range of a rate, which needs two samples; samples arrive every 10 s."""
MAX_MISSED_SHARE = 0.9
"""Maximum share of bad events that an alert may require, for objectives with a large error budget."""
EVALUATION_INTERVAL_S = 15
"""Time between two evaluations of a rule."""
_GROUP_BY = ("job", semconv.REQUEST_MODEL)
_MODEL_LABEL = prometheus.label_name(semconv.REQUEST_MODEL)


def build_rule_groups(spec: SloSpec) -> dict[str, Any]:
    """Returns the content of a rules file: `{"groups": […]}`."""
    groups: list[dict[str, Any]] = [
        {
            "name": f"otel-infer-slo-{objective.name}",
            "interval": _evaluation_interval(spec),
            "rules": _build_objective_rules(objective, spec),
        }
        for objective in spec.objectives
    ]
    if spec.budgets:
        groups.append(
            {"name": "otel-infer-budgets", "interval": "1m", "rules": _build_stage_budget_rules(spec.budgets)}
        )
    causes = [
        _build_cause_alert(_shorten_for_demo(cause) if spec.is_demo else cause, spec)
        for cause in CAUSE_ALERTS
    ]
    groups.append(
        {
            "name": "otel-infer-causes",
            "interval": _evaluation_interval(spec),
            "rules": [*causes, _build_watchdog()],
        }
    )
    return {"groups": groups}


def _evaluation_interval(spec: SloSpec) -> str:
    return "2s" if spec.is_demo else f"{EVALUATION_INTERVAL_S}s"


def missed_ratio_query(objective: SloObjective, window: str) -> str:
    """Returns the PromQL of the share of bad events, 0 to 1."""
    promql, metric = _objective_promql(objective, window), OBJECTIVE_METRICS[objective.of]
    whole = promql.rate(metric, by=_GROUP_BY)
    if objective.of == ERRORS:
        return ratio_or_zero(
            promql.rate(
                metric, label_not_matches(semconv.ERROR_TYPE, "|".join(semconv.NON_ERROR_TYPES)), by=_GROUP_BY
            ),
            whole,
        )
    good = promql.rate(metric, _bucket_matcher(objective.within), by=_GROUP_BY, series=prometheus.BUCKET)
    return f"1 - {ratio_or_absent(good, whole)}"


def _objective_promql(objective: SloObjective, window: str) -> PromqlBuilder:
    return PromqlBuilder({semconv.REQUEST_MODEL: objective.model} if objective.model else {}, window)


def _bucket_matcher(bound: float) -> str:
    """Returns a matcher for the bucket with this bound.

    A whole number is `1` over OTLP and `1.0` in a scrape.
    """
    return f'le=~"{bound:.0f}([.]0)?"' if bound == int(bound) else f'le="{bound!r}"'


def _build_objective_rules(objective: SloObjective, spec: SloSpec) -> list[Rule]:
    ranges = dict.fromkeys(length for window in spec.windows for length in (window.short, window.long))
    recorded: list[Rule] = [
        {"record": _ratio_record_name(objective, length), "expr": missed_ratio_query(objective, length)}
        for length in ranges
    ]
    for length in dict.fromkeys(window.long for window in spec.windows):
        expr = _objective_promql(objective, length).increase(
            OBJECTIVE_METRICS[objective.of], by=_GROUP_BY, series=prometheus.COUNT
        )
        recorded.append({"record": _events_record_name(objective, length), "expr": expr})
    return recorded + [_build_burn_rate_alert(objective, window, spec) for window in spec.windows]


def _ratio_record_name(objective: SloObjective, window: str) -> str:
    return f"otel_infer:{_record_name_part(objective)}_missed:ratio_rate{window}"


def _events_record_name(objective: SloObjective, window: str) -> str:
    return f"otel_infer:{_record_name_part(objective)}_events:increase{window}"


def _record_name_part(objective: SloObjective) -> str:
    return objective.name.replace("-", "_")


def _build_burn_rate_alert(objective: SloObjective, window: BurnRateWindow, spec: SloSpec) -> Rule:
    # No more than 100 % of events can be bad. For a large budget the factor is lowered to what can be reached.
    budget = 1 - objective.share
    factor = min(window.factor, max(MAX_MISSED_SHARE / budget, 1))
    threshold = f"{factor:.6g} * {budget:.6g}"
    expr = (
        f"{_ratio_record_name(objective, window.long)} > {threshold} and "
        f"{_ratio_record_name(objective, window.short)} > {threshold} "
        f"and {_events_record_name(objective, window.long)} >= {spec.minimum}"
    )
    target = (
        f"{objective.of} within {objective.within:g} s" if objective.within else "requests without an error"
    )
    return _build_alert(
        f"{_to_camel_case(objective.name)}BudgetBurn",
        expr,
        window.pending_period,
        {"severity": window.severity, "slo": objective.name, "long": window.long, "short": window.short},
        {
            "summary": f"{{{{ $labels.job }}}} {{{{ $labels.{_MODEL_LABEL} }}}}: {{{{ $value | humanizePercentage }}}} missed {target} "
            f"over {window.long}; the objective is {objective.share * 100:g} %",
            "description": f"The error budget burns at {factor:.3g} times the sustainable rate. Latency breakdown shows the "
            "stage, Overview the cause.",
        },
        "overview",
        spec,
    )


def _build_stage_budget_rules(budgets: Mapping[str, float]) -> list[Rule]:
    stage = prometheus.label_name(semconv.STAGE)
    return [
        {"record": prometheus.STAGE_BUDGET, "expr": f"vector({length:g})", "labels": {stage: name}}
        for name, length in budgets.items()
    ]


def _build_cause_alert(cause: CauseAlert, spec: SloSpec) -> Rule:
    annotations = {
        "summary": cause.summary,
        "description": f"{cause.meaning} Users report: {cause.symptom}. First step: {cause.change}",
    }
    return _build_alert(
        cause.name,
        cause.expr,
        cause.pending_period,
        {"severity": cause.severity},
        annotations,
        cause.dashboard,
        spec,
    )


def _shorten_for_demo(cause: CauseAlert) -> CauseAlert:
    expr = re.sub(r"(?<=[ :])\d+[mh]\b", lambda match: _shorten_duration(match[0]), cause.expr)
    expr = re.sub(r"(?<=\[)\d+[mh]\b", lambda match: _shorten_duration(match[0], MIN_RANGE_S), expr)
    return cause._replace(expr=expr, pending_period=_shorten_duration(cause.pending_period))


def _shorten_duration(length: str, minimum_s: int = 0) -> str:
    seconds = int(length[:-1]) * {"s": 1, "m": 60, "h": 3600}[length[-1]]
    return f"{max(seconds // DEMO_SPEEDUP, minimum_s)}s"


def _build_alert(
    name: str,
    expr: str,
    pending_period: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    dashboard: str,
    spec: SloSpec,
) -> Rule:
    links = {
        "dashboard_url": f"{spec.grafana}/d/{UID_PREFIX}{dashboard}?var-job={{{{ $labels.job | urlquery }}}}"
    }
    if spec.runbooks:
        links["runbook_url"] = f"{spec.runbooks}#{runbook_anchor(name)}"
    rule: Rule = {"alert": ALERT_PREFIX + name, "expr": expr}
    if pending_period != "0s":
        rule["for"] = pending_period
    return {
        **rule,
        "keep_firing_for": _shorten_duration(KEEP_FIRING) if spec.is_demo else KEEP_FIRING,
        "labels": dict(labels),
        "annotations": {**annotations, **links},
    }


def _build_watchdog() -> Rule:
    annotations = {
        "summary": "alert delivery works",
        "description": "Always firing. If its notifications stop, alerts do not reach their receivers.",
    }
    return {
        "alert": ALERT_PREFIX + WATCHDOG,
        "expr": "vector(1)",
        "labels": {"severity": "none"},
        "annotations": annotations,
    }


def runbook_anchor(name: str) -> str:
    """Returns the anchor of an alert's heading on the runbook page."""
    return (ALERT_PREFIX + name).lower()


def _to_camel_case(name: str) -> str:
    return "".join(
        word.capitalize() if len(word) > 4 else word.upper() for word in name.replace("_", "-").split("-")
    )
