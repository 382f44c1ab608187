"""Parses and checks service level objectives, as written in `slo.yaml`.

Pure: `parse_spec` receives the parsed YAML.

    windows: standard            # or demo: minutes instead of hours and days
    minimum: 50                  # events in the long window (for itl: gaps between tokens); below it no alert fires
    grafana: https://grafana.example.com
    runbooks: https://…/alerts.md
    objectives:
      - {name: ttft, of: ttft, within: 500ms, share: 99%}
      - {name: ttft-70b, of: ttft, within: 1.5s, share: 99%, model: "llama-70b"}
      - {name: errors, of: errors, share: 99.5%}
    budgets: {queue: 100ms, prefill: 350ms}

A latency objective is a share of events within a bound, so the bound must be a bucket bound of the histogram.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.config import slo
from otel_infer.semconv import Metric

ERRORS = "errors"
OBJECTIVE_METRICS: Mapping[str, Metric] = {
    slo.TTFT: semconv.TIME_TO_FIRST_TOKEN,
    slo.ITL: semconv.INTER_TOKEN_LATENCY,
    slo.TPOT: semconv.TIME_PER_OUTPUT_TOKEN,
    slo.E2E: semconv.REQUEST_DURATION,
    ERRORS: semconv.REQUEST_DURATION,
}
"""The metric of each objective kind (`of`)."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class InvalidSloSpec(ValueError):
    """An invalid value in `slo.yaml`; the message names its place and the expected value."""


class BurnRateWindow(NamedTuple):
    """The windows and the factor of a burn-rate alert (Google's SRE workbook, chapter 5).

    It fires if the budget burns `factor` times as fast as allowed, over `long` and over `short`.
    """

    severity: str
    factor: float
    long: str
    short: str
    pending_period: str


STANDARD_WINDOWS = (
    BurnRateWindow("page", 14.4, "1h", "5m", "1m"),
    BurnRateWindow("page", 6, "6h", "30m", "1m"),
    BurnRateWindow("ticket", 3, "1d", "2h", "1h"),
    BurnRateWindow("ticket", 1, "3d", "6h", "3h"),
)
"""Windows for a budget of 30 days: each fires when 2 %, 5 %, 10 % or 10 % of it is used in its long window.
"""
DEMO_WINDOWS = (
    BurnRateWindow("page", 14.4, "2m", "30s", "6s"),
    BurnRateWindow("ticket", 3, "10m", "2m", "30s"),
)
"""Windows for demonstrations, in which an alert fires within minutes; cause alerts are shortened to seconds,
too.
"""
WINDOW_SETS: Mapping[str, tuple[BurnRateWindow, ...]] = {"standard": STANDARD_WINDOWS, "demo": DEMO_WINDOWS}


class SloObjective(NamedTuple):
    """One objective.

    `of`: a key of `OBJECTIVE_METRICS`. `within`: bound in s, 0 for errors. `share`: share of events that must
    be good, between 0 and 1. `model`: a regular expression, "" = all models.
    """

    name: str
    of: str
    within: float
    share: float
    model: str = ""


class SloSpec(NamedTuple):
    """The content of `slo.yaml`.

    `budgets`: s by stage. `minimum`: events in the long window below which no alert fires. `grafana`,
    `runbooks`: addresses for links in alerts, "" = relative links to dashboards and none to runbooks.
    """

    objectives: Sequence[SloObjective]
    budgets: Mapping[str, float]
    windows: tuple[BurnRateWindow, ...] = STANDARD_WINDOWS
    minimum: int = 50
    grafana: str = ""
    runbooks: str = ""

    @property
    def is_demo(self) -> bool:
        """Whether alerts are to fire within seconds or minutes, for demonstrations."""
        return self.windows == DEMO_WINDOWS


DEFAULT_SPEC = SloSpec(
    (
        SloObjective("ttft", slo.TTFT, 0.5, 0.99),
        SloObjective("itl", slo.ITL, 0.05, 0.99),
        SloObjective("e2e", slo.E2E, 40.96, 0.99),
        SloObjective("errors", ERRORS, 0.0, 0.995),
    ),
    {
        semconv.SPAN_INGRESS: 0.025,
        semconv.SPAN_TOKENIZE: 0.025,
        semconv.SPAN_QUEUE: 0.1,
        semconv.SPAN_PREFILL: 0.35,
        semconv.SPAN_POSTPROCESS: 0.05,
    },
)
"""The objectives of the default rules in `dashboards/alerts`."""


def parse_spec(content: Any) -> SloSpec:
    """Returns the objectives in the parsed content of a YAML file; raises `InvalidSloSpec`."""
    known = set(SloSpec._fields)
    _require_value(isinstance(content, dict), "the file", "a mapping with `objectives`")
    for key in content:
        _require_value(key in known, f"`{key}`", "one of " + ", ".join(sorted(known)))
    windows, minimum = content.get("windows", "standard"), content.get("minimum", 50)
    _require_value(
        isinstance(windows, str) and windows in WINDOW_SETS, "`windows`", "one of " + ", ".join(WINDOW_SETS)
    )
    _require_value(isinstance(minimum, int) and minimum >= 0, "`minimum`", "a whole number, 0 or more")
    return SloSpec(
        objectives=_parse_objectives(content.get("objectives")),
        budgets=_parse_budgets(content.get("budgets") or {}),
        windows=WINDOW_SETS[windows],
        minimum=minimum,
        grafana=_parse_url(content.get("grafana"), "grafana"),
        runbooks=_parse_url(content.get("runbooks"), "runbooks"),
    )


def _parse_objectives(entries: Any) -> list[SloObjective]:
    _require_value(
        isinstance(entries, list) and bool(entries), "`objectives`", "a list with one entry or more"
    )
    objectives = [_parse_objective(entry, f"objectives[{i}]") for i, entry in enumerate(entries)]
    names = {objective.name.replace("-", "_") for objective in objectives}
    _require_value(
        len(names) == len(objectives), "`objectives`", "a different `name` for each (- and _ are the same)"
    )
    return objectives


def _parse_budgets(budgets: Any) -> dict[str, float]:
    _require_value(isinstance(budgets, dict), "`budgets`", "a duration for each stage")
    return {
        _parse_stage(stage): _parse_duration(length, f"budgets.{stage}") for stage, length in budgets.items()
    }


def _parse_objective(entry: Any, where: str) -> SloObjective:
    _check_fields(entry, where)
    name, of, model = entry.get("name"), entry.get("of"), entry.get("model", "")
    _require_value(
        isinstance(name, str) and bool(_NAME.fullmatch(name)),
        f"{where}.name",
        "small letters, digits, - and _",
    )
    _require_value(
        isinstance(of, str) and of in OBJECTIVE_METRICS,
        f"{where}.of",
        "one of " + ", ".join(OBJECTIVE_METRICS),
    )
    _require_value(isinstance(model, str), f"{where}.model", "a regular expression")
    share = _parse_share(entry.get("share", ""), f"{where}.share")
    if of == ERRORS:
        _require_value("within" not in entry, f"{where}.within", "nothing, because errors have no duration")
        return SloObjective(str(name), of, 0.0, share, model)
    bound = _parse_bound(entry.get("within"), OBJECTIVE_METRICS[of], f"{where}.within")
    return SloObjective(str(name), str(of), bound, share, model)


def _check_fields(entry: Any, where: str) -> None:
    _require_value(
        isinstance(entry, dict), where, "a mapping with name, of, within, share and optionally model"
    )
    for key in entry:
        _require_value(
            key in SloObjective._fields, f"{where}.{key}", "one of " + ", ".join(SloObjective._fields)
        )


def _parse_share(text: Any, where: str) -> float:
    match = _SHARE.fullmatch(str(text).strip())
    share = float(match[1]) / 100 if match else 0.0
    _require_value(0 < share < 1, where, "a share such as 99%, below 100%")
    return share


def _parse_bound(text: Any, metric: Metric, where: str) -> float:
    seconds = _parse_duration(text, where)
    bounds = ", ".join(f"{bound:g}s" for bound in metric.bounds)
    _require_value(seconds in metric.bounds, where, f"a bound of {metric.name}: {bounds}")
    return seconds


def _parse_duration(text: Any, where: str) -> float:
    match = _DURATION.fullmatch(str(text).strip())
    _require_value(match is not None, where, "a length such as 500ms or 1.5s")
    assert match is not None
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _parse_stage(name: Any) -> str:
    _require_value(name in semconv.STAGES, f"budgets.{name}", "one of " + ", ".join(semconv.STAGES))
    return str(name)


def _parse_url(text: Any, where: str) -> str:
    if text is None:
        return ""
    _require_value(
        isinstance(text, str) and text.startswith(("http://", "https://")),
        f"`{where}`",
        "an address with http:// or https://",
    )
    return str(text).rstrip("/")


def _require_value(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise InvalidSloSpec(f"{where}: expected {expected}")
