"""Recording rules and alerts for Prometheus, from promises and causes. Pure: rules as its YAML has them, as dictionaries.

A promise burns its budget when too large a share of events was bad over a long window, and still is over a short one (multi-window,
multi-burn-rate: Google's SRE workbook, chapter 5). With little traffic a single slow request would be a large share, so nothing is
said below a number of events in the long window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from otel_infer import semconv
from otel_infer.monitoring.alerts.cause_alerts import CAUSE_ALERTS, WATCHDOG, CauseAlert
from otel_infer.monitoring.alerts.slo_spec import (
    DEMO_WINDOWS,
    ERRORS,
    OBJECTIVE_METRICS,
    BurnRateWindow,
    SloObjective,
    SloSpec,
)
from otel_infer.monitoring.dashboards.dashboard import UID_PREFIX
from otel_infer.monitoring.promql import PromqlBuilder, label_not_matches, ratio_or_absent, ratio_or_zero
from otel_infer.semconv import prometheus

Rule = dict[str, Any]

ALERT_PREFIX = "OtelInfer"
KEEP_FIRING = "5m"
"""So that an alert does not flap."""
DEMO_SPEEDUP = 20
"""Times as fast are causes told where somebody wants to see it."""
MIN_RANGE_S = 30
"""A range of at least so long has two samples at any time, which come every 10 s; with fewer there is no rate."""
MAX_MISSED_SHARE = 0.9
"""The share of events that have to be missed for the fastest burn, if the promise leaves more room than that."""
EVALUATION_INTERVAL_S = 15
"""Seconds between two evaluations."""
_GROUP_BY = ("job", semconv.REQUEST_MODEL)
_MODEL_LABEL = prometheus.label_name(semconv.REQUEST_MODEL)


def build_rule_groups(spec: SloSpec) -> dict[str, Any]:
    """The whole file: `{"groups": […]}`."""
    said: list[dict[str, Any]] = [
        {
            "name": f"otel-infer-slo-{one.name}",
            "interval": _evaluation_interval(spec),
            "rules": _build_objective_rules(one, spec),
        }
        for one in spec.objectives
    ]
    if spec.budgets:
        said.append(
            {"name": "otel-infer-budgets", "interval": "1m", "rules": _build_stage_budget_rules(spec.budgets)}
        )
    causes = [
        _build_cause_alert(_shorten_for_demo(cause) if spec.windows is DEMO_WINDOWS else cause, spec)
        for cause in CAUSE_ALERTS
    ]
    said.append(
        {
            "name": "otel-infer-causes",
            "interval": _evaluation_interval(spec),
            "rules": [*causes, _build_watchdog(spec)],
        }
    )
    return {"groups": said}


def _evaluation_interval(spec: SloSpec) -> str:
    return "2s" if spec.windows is DEMO_WINDOWS else f"{EVALUATION_INTERVAL_S}s"


def missed_ratio_query(objective: SloObjective, window: str) -> str:
    """Share of events that were bad, in PromQL."""
    ask, metric = _objective_promql(objective, window), OBJECTIVE_METRICS[objective.of]
    whole = ask.rate(metric, by=_GROUP_BY)
    if objective.of == ERRORS:
        return ratio_or_zero(
            ask.rate(
                metric, label_not_matches(semconv.ERROR_TYPE, "|".join(semconv.NON_ERROR_TYPES)), by=_GROUP_BY
            ),
            whole,
        )
    good = ask.rate(metric, _bucket_matcher(objective.within), by=_GROUP_BY, series=prometheus.BUCKET)
    return f"1 - {ratio_or_absent(good, whole)}"


def _objective_promql(objective: SloObjective, window: str) -> PromqlBuilder:
    return PromqlBuilder({semconv.REQUEST_MODEL: objective.model} if objective.model else {}, window)


def _bucket_matcher(bound: float) -> str:
    """Whole numbers are written `1` by those that come over OTLP, and `1.0` by those that are scraped."""
    return f'le=~"{bound:.0f}([.]0)?"' if bound == int(bound) else f'le="{bound!r}"'


def _build_objective_rules(objective: SloObjective, spec: SloSpec) -> list[Rule]:
    windows = dict.fromkeys(window for one in spec.windows for window in (one.short, one.long))
    recorded: list[Rule] = [
        {"record": _ratio_record_name(objective, window), "expr": missed_ratio_query(objective, window)}
        for window in windows
    ]
    for window in dict.fromkeys(one.long for one in spec.windows):
        expr = _objective_promql(objective, window).increase(
            OBJECTIVE_METRICS[objective.of], by=_GROUP_BY, series=prometheus.COUNT
        )
        recorded.append({"record": _events_record_name(objective, window), "expr": expr})
    return recorded + [_build_burn_rate_alert(objective, window, spec) for window in spec.windows]


def _ratio_record_name(objective: SloObjective, window: str) -> str:
    return f"otel_infer:{_record_name_part(objective)}_missed:ratio_rate{window}"


def _events_record_name(objective: SloObjective, window: str) -> str:
    return f"otel_infer:{_record_name_part(objective)}_events:increase{window}"


def _record_name_part(objective: SloObjective) -> str:
    return objective.name.replace("-", "_")


def _build_burn_rate_alert(objective: SloObjective, window: BurnRateWindow, spec: SloSpec) -> Rule:
    # More than all cannot be missed: of a promise that leaves much room, a fast burn is when nearly nothing is kept.
    room = 1 - objective.share
    factor = min(window.factor, max(MAX_MISSED_SHARE / room, 1))
    bar = f"{factor:.6g} * {room:.6g}"
    expr = (
        f"{_ratio_record_name(objective, window.long)} > {bar} and {_ratio_record_name(objective, window.short)} > {bar} "
        f"and {_events_record_name(objective, window.long)} >= {spec.minimum}"
    )
    what = (
        f"{objective.of} within {objective.within:g} s" if objective.within else "requests without an error"
    )
    return _build_alert(
        f"{_to_camel_case(objective.name)}BudgetBurn",
        expr,
        window.pending_period,
        {"severity": window.severity, "slo": objective.name, "long": window.long, "short": window.short},
        {
            "summary": f"{{{{ $labels.job }}}} {{{{ $labels.{_MODEL_LABEL} }}}}: {{{{ $value | humanizePercentage }}}} missed {what} "
            f"over {window.long}; in {objective.share * 100:g} % it was promised",
            "description": f"The error budget goes {factor:.3g} times as fast as it may. Which stage it is: Request anatomy; "
            "which cause: Overview.",
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
        "description": f"{cause.meaning} People say: {cause.symptom}. First: {cause.change}",
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
    expr = re.sub(r"(?<=[ :])\d+[mh]\b", lambda found: _shorten_duration(found[0]), cause.expr)
    expr = re.sub(r"(?<=\[)\d+[mh]\b", lambda found: _shorten_duration(found[0], MIN_RANGE_S), expr)
    return cause._replace(expr=expr, pending_period=_shorten_duration(cause.pending_period))


def _shorten_duration(length: str, least: int = 0) -> str:
    seconds = int(length[:-1]) * {"s": 1, "m": 60, "h": 3600}[length[-1]]
    return f"{max(seconds // DEMO_SPEEDUP, least)}s"


def _build_alert(
    name: str,
    expr: str,
    hold: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    board: str,
    spec: SloSpec,
) -> Rule:
    links = {
        "dashboard_url": f"{spec.grafana}/d/{UID_PREFIX}{board}?var-job={{{{ $labels.job | urlquery }}}}"
    }
    if spec.runbooks:
        links["runbook_url"] = f"{spec.runbooks}#{runbook_anchor(name)}"
    rule: Rule = {"alert": ALERT_PREFIX + name, "expr": expr}
    if hold != "0s":
        rule["for"] = hold
    return {
        **rule,
        "keep_firing_for": _shorten_duration(KEEP_FIRING) if spec.windows is DEMO_WINDOWS else KEEP_FIRING,
        "labels": dict(labels),
        "annotations": {**annotations, **links},
    }


def _build_watchdog(spec: SloSpec) -> Rule:
    annotations = {
        "summary": "alerts can come",
        "description": "Fires always. If it does not, alerts are lost on their way.",
    }
    return {
        "alert": ALERT_PREFIX + WATCHDOG,
        "expr": "vector(1)",
        "labels": {"severity": "none"},
        "annotations": annotations,
    }


def runbook_anchor(name: str) -> str:
    """Of an alert's headline on the page of runbooks."""
    return (ALERT_PREFIX + name).lower()


def _to_camel_case(name: str) -> str:
    return "".join(
        word.capitalize() if len(word) > 4 else word.upper() for word in name.replace("_", "-").split("-")
    )
