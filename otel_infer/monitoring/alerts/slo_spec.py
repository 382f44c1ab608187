"""What is promised, as people write it in `slo.yaml`, checked. Pure; `promises` is given what the YAML says.

    windows: standard            # or demo: minutes in place of hours and days
    minimum: 50                  # requests in the long window (streams' gaps for itl), or nothing is said
    grafana: https://grafana.example.com
    runbooks: https://…/alerts.md
    objectives:
      - {name: ttft, of: ttft, within: 500ms, share: 99%}
      - {name: ttft-70b, of: ttft, within: 1.5s, share: 99%, model: "llama-70b"}
      - {name: errors, of: errors, share: 99.5%}
    budgets: {queue: 100ms, prefill: 350ms}

A latency objective is a share of events that were fast enough, so its bound has to be one of the histogram's.
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
"""What an objective may be of."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class InvalidSloSpec(ValueError):
    """What is wrong in `slo.yaml`, where, and what is expected there."""


class BurnRateWindow(NamedTuple):
    """A burn-rate alert: so much of the budget goes in `long`, and still does in `short` (Google's SRE workbook, ch. 5)."""

    severity: str
    factor: float
    long: str
    short: str
    pending_period: str


STANDARD_WINDOWS = (
    BurnRateWindow("page", 14.4, "1h", "5m", "2m"),
    BurnRateWindow("page", 6, "6h", "30m", "15m"),
    BurnRateWindow("ticket", 3, "1d", "2h", "1h"),
    BurnRateWindow("ticket", 1, "3d", "6h", "3h"),
)
"""For a budget of 30 days: 2 %, 5 %, 10 % and 10 % of it."""
DEMO_WINDOWS = (
    BurnRateWindow("page", 14.4, "2m", "30s", "6s"),
    BurnRateWindow("ticket", 3, "10m", "2m", "30s"),
)
"""For somebody who wants to see one fire; causes are told in seconds then, too."""
WINDOW_SETS: Mapping[str, tuple[BurnRateWindow, ...]] = {"standard": STANDARD_WINDOWS, "demo": DEMO_WINDOWS}


class SloObjective(NamedTuple):
    """`within` in s, 0 for errors; `share` of the events that have to be good, 0 to 1; `model`: a regular expression."""

    name: str
    of: str
    within: float
    share: float
    model: str = ""


class SloSpec(NamedTuple):
    """All of it."""

    objectives: Sequence[SloObjective]
    budgets: Mapping[str, float]
    windows: tuple[BurnRateWindow, ...] = STANDARD_WINDOWS
    minimum: int = 50
    grafana: str = ""
    runbooks: str = ""


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
"""What the rules that come along are made from."""


def parse_spec(said: Any) -> SloSpec:
    """The promises in what a YAML file says; raises `BadSpec`."""
    known = set(SloSpec._fields)
    _require_value(isinstance(said, dict), "the file", "a mapping with `objectives`")
    for key in said:
        _require_value(key in known, f"`{key}`", "one of " + ", ".join(sorted(known)))
    listed = said.get("objectives")
    _require_value(isinstance(listed, list) and bool(listed), "`objectives`", "a list with one entry or more")
    found = [_parse_objective(entry, f"objectives[{i}]") for i, entry in enumerate(listed)]
    names = {one.name.replace("-", "_") for one in found}
    _require_value(
        len(names) == len(found), "`objectives`", "a different `name` for each (- and _ are the same)"
    )
    budgets = said.get("budgets") or {}
    _require_value(isinstance(budgets, dict), "`budgets`", "a length for each stage")
    windows, minimum = said.get("windows", "standard"), said.get("minimum", 50)
    _require_value(
        isinstance(windows, str) and windows in WINDOW_SETS, "`windows`", "one of " + ", ".join(WINDOW_SETS)
    )
    _require_value(isinstance(minimum, int) and minimum >= 0, "`minimum`", "a whole number, 0 or more")
    return SloSpec(
        found,
        {
            _parse_stage(stage): _parse_duration(length, f"budgets.{stage}")
            for stage, length in budgets.items()
        },
        WINDOW_SETS[windows],
        minimum,
        _parse_url(said.get("grafana"), "grafana"),
        _parse_url(said.get("runbooks"), "runbooks"),
    )


def _parse_objective(entry: Any, where: str) -> SloObjective:
    _require_value(isinstance(entry, dict), where, "name, of, within, share and maybe model")
    for key in entry:
        _require_value(
            key in SloObjective._fields, f"{where}.{key}", "one of " + ", ".join(SloObjective._fields)
        )
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
    found = _SHARE.fullmatch(str(entry.get("share", "")).strip())
    share = float(found[1]) / 100 if found else 0.0
    _require_value(0 < share < 1, f"{where}.share", "a share such as 99%, below 100%")
    if of == ERRORS:
        _require_value("within" not in entry, f"{where}.within", "nothing: errors have no length")
        return SloObjective(str(name), of, 0.0, share, model)
    return SloObjective(
        str(name),
        str(of),
        _parse_bound(entry.get("within"), OBJECTIVE_METRICS[of], f"{where}.within"),
        share,
        model,
    )


def _parse_bound(text: Any, metric: Metric, where: str) -> float:
    length = _parse_duration(text, where)
    bounds = ", ".join(f"{bound:g}s" for bound in metric.bounds)
    _require_value(length in metric.bounds, where, f"a bound of {metric.name}: {bounds}")
    return length


def _parse_duration(text: Any, where: str) -> float:
    found = _DURATION.fullmatch(str(text).strip())
    _require_value(found is not None, where, "a length such as 500ms or 1.5s")
    assert found is not None
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _parse_stage(name: Any) -> str:
    _require_value(name in semconv.STAGES, f"budgets.{name}", "one of " + ", ".join(semconv.STAGES))
    return str(name)


def _parse_url(text: Any, where: str) -> str:
    if text is None:
        return ""
    _require_value(
        isinstance(text, str) and text.startswith(("http://", "https://")),
        f"`{where}`",
        "an address with http",
    )
    return str(text).rstrip("/")


def _require_value(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise InvalidSloSpec(f"{where}: expected {expected}")
