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
METRICS: Mapping[str, Metric] = {
    slo.TTFT: semconv.TIME_TO_FIRST_TOKEN,
    slo.ITL: semconv.INTER_TOKEN_LATENCY,
    slo.TPOT: semconv.TIME_PER_OUTPUT_TOKEN,
    slo.E2E: semconv.REQUEST_DURATION,
    ERRORS: semconv.REQUEST_DURATION,
}
"""What an objective may be of."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class BadSpec(ValueError):
    """What is wrong in `slo.yaml`, where, and what is expected there."""


class Window(NamedTuple):
    """A burn-rate alert: so much of the budget goes in `long`, and still does in `short` (Google's SRE workbook, ch. 5)."""

    severity: str
    factor: float
    long: str
    short: str
    hold: str


STANDARD = (
    Window("page", 14.4, "1h", "5m", "2m"),
    Window("page", 6, "6h", "30m", "15m"),
    Window("ticket", 3, "1d", "2h", "1h"),
    Window("ticket", 1, "3d", "6h", "3h"),
)
"""For a budget of 30 days: 2 %, 5 %, 10 % and 10 % of it."""
DEMO = (Window("page", 14.4, "2m", "30s", "6s"), Window("ticket", 3, "10m", "2m", "30s"))
"""For somebody who wants to see one fire; causes are told in seconds then, too."""
WINDOWS: Mapping[str, tuple[Window, ...]] = {"standard": STANDARD, "demo": DEMO}


class Objective(NamedTuple):
    """`within` in s, 0 for errors; `share` of the events that have to be good, 0 to 1; `model`: a regular expression."""

    name: str
    of: str
    within: float
    share: float
    model: str = ""


class Spec(NamedTuple):
    """All of it."""

    objectives: Sequence[Objective]
    budgets: Mapping[str, float]
    windows: tuple[Window, ...] = STANDARD
    minimum: int = 50
    grafana: str = ""
    runbooks: str = ""


DEFAULT = Spec(
    (
        Objective("ttft", slo.TTFT, 0.5, 0.99),
        Objective("itl", slo.ITL, 0.05, 0.99),
        Objective("e2e", slo.E2E, 40.96, 0.99),
        Objective("errors", ERRORS, 0.0, 0.995),
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


def spec(said: Any) -> Spec:
    """The promises in what a YAML file says; raises `BadSpec`."""
    known = set(Spec._fields)
    _expect(isinstance(said, dict), "the file", "a mapping with `objectives`")
    for key in said:
        _expect(key in known, f"`{key}`", "one of " + ", ".join(sorted(known)))
    listed = said.get("objectives")
    _expect(isinstance(listed, list) and bool(listed), "`objectives`", "a list with one entry or more")
    found = [_objective(entry, f"objectives[{i}]") for i, entry in enumerate(listed)]
    names = {one.name.replace("-", "_") for one in found}
    _expect(len(names) == len(found), "`objectives`", "a different `name` for each (- and _ are the same)")
    budgets = said.get("budgets") or {}
    _expect(isinstance(budgets, dict), "`budgets`", "a length for each stage")
    windows, minimum = said.get("windows", "standard"), said.get("minimum", 50)
    _expect(isinstance(windows, str) and windows in WINDOWS, "`windows`", "one of " + ", ".join(WINDOWS))
    _expect(isinstance(minimum, int) and minimum >= 0, "`minimum`", "a whole number, 0 or more")
    return Spec(
        found,
        {_stage(stage): _length(length, f"budgets.{stage}") for stage, length in budgets.items()},
        WINDOWS[windows],
        minimum,
        _url(said.get("grafana"), "grafana"),
        _url(said.get("runbooks"), "runbooks"),
    )


def _objective(entry: Any, where: str) -> Objective:
    _expect(isinstance(entry, dict), where, "name, of, within, share and maybe model")
    for key in entry:
        _expect(key in Objective._fields, f"{where}.{key}", "one of " + ", ".join(Objective._fields))
    name, of, model = entry.get("name"), entry.get("of"), entry.get("model", "")
    _expect(
        isinstance(name, str) and bool(_NAME.fullmatch(name)),
        f"{where}.name",
        "small letters, digits, - and _",
    )
    _expect(isinstance(of, str) and of in METRICS, f"{where}.of", "one of " + ", ".join(METRICS))
    _expect(isinstance(model, str), f"{where}.model", "a regular expression")
    found = _SHARE.fullmatch(str(entry.get("share", "")).strip())
    share = float(found[1]) / 100 if found else 0.0
    _expect(0 < share < 1, f"{where}.share", "a share such as 99%, below 100%")
    if of == ERRORS:
        _expect("within" not in entry, f"{where}.within", "nothing: errors have no length")
        return Objective(str(name), of, 0.0, share, model)
    return Objective(
        str(name), str(of), _bound(entry.get("within"), METRICS[of], f"{where}.within"), share, model
    )


def _bound(text: Any, metric: Metric, where: str) -> float:
    length = _length(text, where)
    bounds = ", ".join(f"{bound:g}s" for bound in metric.bounds)
    _expect(length in metric.bounds, where, f"a bound of {metric.name}: {bounds}")
    return length


def _length(text: Any, where: str) -> float:
    found = _LENGTH.fullmatch(str(text).strip())
    _expect(found is not None, where, "a length such as 500ms or 1.5s")
    assert found is not None
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _stage(name: Any) -> str:
    _expect(name in semconv.STAGES, f"budgets.{name}", "one of " + ", ".join(semconv.STAGES))
    return str(name)


def _url(text: Any, where: str) -> str:
    if text is None:
        return ""
    _expect(
        isinstance(text, str) and text.startswith(("http://", "https://")),
        f"`{where}`",
        "an address with http",
    )
    return str(text).rstrip("/")


def _expect(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise BadSpec(f"{where}: expected {expected}")
