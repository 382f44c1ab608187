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
from otel_infer.monitoring.alerts.cause_alerts import CAUSES, WATCHDOG, Cause
from otel_infer.monitoring.alerts.slo_spec import DEMO, ERRORS, METRICS, Objective, Spec, Window
from otel_infer.monitoring.dashboards.dashboard import UID
from otel_infer.monitoring.promql import Promql, per, share, unlike
from otel_infer.semconv import prometheus

Rule = dict[str, Any]

PREFIX = "OtelInfer"
KEEP_FIRING = "5m"
"""So that an alert does not flap."""
HURRY = 20
"""Times as fast are causes told where somebody wants to see it."""
WITH_TWO_SAMPLES_S = 30
"""A range of at least so long has two samples at any time, which come every 10 s; with fewer there is no rate."""
MOST_MISSED = 0.9
"""The share of events that have to be missed for the fastest burn, if the promise leaves more room than that."""
EVALUATED_S = 15
"""Seconds between two evaluations."""
_BY = ("job", semconv.REQUEST_MODEL)
_MODEL = prometheus.label(semconv.REQUEST_MODEL)


def groups(spec: Spec) -> dict[str, Any]:
    """The whole file: `{"groups": […]}`."""
    said: list[dict[str, Any]] = [
        {"name": f"otel-infer-slo-{one.name}", "interval": _interval(spec), "rules": _of(one, spec)}
        for one in spec.objectives
    ]
    if spec.budgets:
        said.append({"name": "otel-infer-budgets", "interval": "1m", "rules": _budgets(spec.budgets)})
    causes = [_cause(_hurried(cause) if spec.windows is DEMO else cause, spec) for cause in CAUSES]
    said.append(
        {"name": "otel-infer-causes", "interval": _interval(spec), "rules": [*causes, _watchdog(spec)]}
    )
    return {"groups": said}


def _interval(spec: Spec) -> str:
    return "2s" if spec.windows is DEMO else f"{EVALUATED_S}s"


def missed(objective: Objective, window: str) -> str:
    """Share of events that were bad, in PromQL."""
    ask, metric = _about(objective, window), METRICS[objective.of]
    whole = ask.rate(metric, by=_BY)
    if objective.of == ERRORS:
        return share(
            ask.rate(metric, unlike(semconv.ERROR_TYPE, "|".join(semconv.NOT_ERRORS)), by=_BY), whole
        )
    good = ask.rate(metric, _le(objective.within), by=_BY, series=prometheus.BUCKET)
    return f"1 - {per(good, whole)}"


def _about(objective: Objective, window: str) -> Promql:
    return Promql({semconv.REQUEST_MODEL: objective.model} if objective.model else {}, window)


def _le(bound: float) -> str:
    """Whole numbers are written `1` by those that come over OTLP, and `1.0` by those that are scraped."""
    return f'le=~"{bound:.0f}([.]0)?"' if bound == int(bound) else f'le="{bound!r}"'


def _of(objective: Objective, spec: Spec) -> list[Rule]:
    windows = dict.fromkeys(window for one in spec.windows for window in (one.short, one.long))
    recorded: list[Rule] = [
        {"record": _ratio(objective, window), "expr": missed(objective, window)} for window in windows
    ]
    for window in dict.fromkeys(one.long for one in spec.windows):
        expr = _about(objective, window).increase(METRICS[objective.of], by=_BY, series=prometheus.COUNT)
        recorded.append({"record": _events(objective, window), "expr": expr})
    return recorded + [_burn(objective, window, spec) for window in spec.windows]


def _ratio(objective: Objective, window: str) -> str:
    return f"otel_infer:{_word(objective)}_missed:ratio_rate{window}"


def _events(objective: Objective, window: str) -> str:
    return f"otel_infer:{_word(objective)}_events:increase{window}"


def _word(objective: Objective) -> str:
    return objective.name.replace("-", "_")


def _burn(objective: Objective, window: Window, spec: Spec) -> Rule:
    # More than all cannot be missed: of a promise that leaves much room, a fast burn is when nearly nothing is kept.
    room = 1 - objective.share
    factor = min(window.factor, max(MOST_MISSED / room, 1))
    bar = f"{factor:.6g} * {room:.6g}"
    expr = (
        f"{_ratio(objective, window.long)} > {bar} and {_ratio(objective, window.short)} > {bar} "
        f"and {_events(objective, window.long)} >= {spec.minimum}"
    )
    what = (
        f"{objective.of} within {objective.within:g} s" if objective.within else "requests without an error"
    )
    return _alert(
        f"{_camel(objective.name)}BudgetBurn",
        expr,
        window.hold,
        {"severity": window.severity, "slo": objective.name, "long": window.long, "short": window.short},
        {
            "summary": f"{{{{ $labels.job }}}} {{{{ $labels.{_MODEL} }}}}: {{{{ $value | humanizePercentage }}}} missed {what} "
            f"over {window.long}; in {objective.share * 100:g} % it was promised",
            "description": f"The error budget goes {factor:.3g} times as fast as it may. Which stage it is: Request anatomy; "
            "which cause: Overview.",
        },
        "overview",
        spec,
    )


def _budgets(budgets: Mapping[str, float]) -> list[Rule]:
    stage = prometheus.label(semconv.STAGE)
    return [
        {"record": prometheus.STAGE_BUDGET, "expr": f"vector({length:g})", "labels": {stage: name}}
        for name, length in budgets.items()
    ]


def _cause(cause: Cause, spec: Spec) -> Rule:
    annotations = {
        "summary": cause.says,
        "description": f"{cause.means} People say: {cause.complaint}. First: {cause.change}",
    }
    return _alert(
        cause.name, cause.expr, cause.hold, {"severity": cause.severity}, annotations, cause.board, spec
    )


def _hurried(cause: Cause) -> Cause:
    expr = re.sub(r"(?<=[ :])\d+[mh]\b", lambda found: _shorter(found[0]), cause.expr)
    expr = re.sub(r"(?<=\[)\d+[mh]\b", lambda found: _shorter(found[0], WITH_TWO_SAMPLES_S), expr)
    return cause._replace(expr=expr, hold=_shorter(cause.hold))


def _shorter(length: str, least: int = 0) -> str:
    seconds = int(length[:-1]) * {"s": 1, "m": 60, "h": 3600}[length[-1]]
    return f"{max(seconds // HURRY, least)}s"


def _alert(
    name: str,
    expr: str,
    hold: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    board: str,
    spec: Spec,
) -> Rule:
    links = {"dashboard_url": f"{spec.grafana}/d/{UID}{board}?var-job={{{{ $labels.job | urlquery }}}}"}
    if spec.runbooks:
        links["runbook_url"] = f"{spec.runbooks}#{anchor(name)}"
    rule: Rule = {"alert": PREFIX + name, "expr": expr}
    if hold != "0s":
        rule["for"] = hold
    return {
        **rule,
        "keep_firing_for": _shorter(KEEP_FIRING) if spec.windows is DEMO else KEEP_FIRING,
        "labels": dict(labels),
        "annotations": {**annotations, **links},
    }


def _watchdog(spec: Spec) -> Rule:
    annotations = {
        "summary": "alerts can come",
        "description": "Fires always. If it does not, alerts are lost on their way.",
    }
    return {
        "alert": PREFIX + WATCHDOG,
        "expr": "vector(1)",
        "labels": {"severity": "none"},
        "annotations": annotations,
    }


def anchor(name: str) -> str:
    """Of an alert's headline on the page of runbooks."""
    return (PREFIX + name).lower()


def _camel(name: str) -> str:
    return "".join(
        word.capitalize() if len(word) > 4 else word.upper() for word in name.replace("_", "-").split("-")
    )
