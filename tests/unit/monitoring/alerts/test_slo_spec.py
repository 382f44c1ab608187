"""The content of slo.yaml, and the errors for invalid content."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from otel_infer import cli, semconv
from otel_infer.monitoring.alerts import burn_rate_rules, grafana_rules, slo_spec

GOOD = """
windows: demo
minimum: 10
grafana: https://grafana.example.com/
runbooks: https://example.com/alerts.md
objectives:
  - {name: ttft, of: ttft, within: 500ms, share: 99%}
  - {name: ttft-70b, of: ttft, within: 1.5s, share: 99.9%, model: "llama-70b.*"}
  - {name: errors, of: errors, share: 99.5%}
budgets: {queue: 100ms, prefill: 0.35s}
"""


def test_objectives_are_parsed() -> None:
    assert slo_spec.parse_spec(yaml.safe_load(GOOD)) == slo_spec.SloSpec(
        [
            slo_spec.SloObjective("ttft", "ttft", 0.5, 0.99),
            slo_spec.SloObjective("ttft-70b", "ttft", 1.5, 0.9990000000000001, "llama-70b.*"),
            slo_spec.SloObjective("errors", "errors", 0.0, 0.995),
        ],
        {"queue": 0.1, "prefill": 0.35},
        slo_spec.DEMO_WINDOWS,
        10,
        "https://grafana.example.com",
        "https://example.com/alerts.md",
    )


TTFT = {"name": "ttft", "of": "ttft", "within": "500ms", "share": "99%"}
BAD: dict[str, tuple[Any, str]] = {
    "empty file": (None, "the file: expected a mapping with `objectives`"),
    "no objectives": ({}, "`objectives`: expected a list with one entry or more"),
    "unknown key": ({"objektives": []}, "`objektives`: expected one of budgets, grafana, minimum"),
    "duplicate name": ({"objectives": [TTFT, TTFT]}, "`objectives`: expected a different `name` for each"),
    "name with spaces": ({"objectives": [{**TTFT, "name": "a b"}]}, "objectives[0].name: expected small letters"),
    "unknown kind": ({"objectives": [{**TTFT, "of": "speed"}]}, "objectives[0].of: expected one of ttft, itl, tpot, e2e"),
    "not a histogram bound": ({"objectives": [{**TTFT, "within": "600ms"}]}, "objectives[0].within: expected a bound of gen_ai.server.time"),
    "not a duration": ({"objectives": [{**TTFT, "within": "fast"}]}, "objectives[0].within: expected a length such as 500ms"),
    "share of 100 %": ({"objectives": [{**TTFT, "share": "100%"}]}, "objectives[0].share: expected a share such as 99%"),
    "share as a number": ({"objectives": [{**TTFT, "share": 0.99}]}, "objectives[0].share: expected a share such as 99%"),
    "errors with a bound": ({"objectives": [{**TTFT, "of": "errors"}]}, "objectives[0].within: expected nothing"),
    "numeric model": ({"objectives": [{**TTFT, "model": 7}]}, "objectives[0].model: expected a regular expression"),
    "names equal but for - and _": ({"objectives": [{**TTFT, "name": "a-b"}, {**TTFT, "name": "a_b"}]}, "`objectives`: expected a different"),
    "unknown key of an objective": ({"objectives": [{**TTFT, "than": 1}]}, "objectives[0].than: expected one of name, of"),
    "unknown windows": ({"objectives": [TTFT], "windows": "fast"}, "`windows`: expected one of standard, demo"),
    "negative minimum": ({"objectives": [TTFT], "minimum": -1}, "`minimum`: expected a whole number"),
    "unknown stage": ({"objectives": [TTFT], "budgets": {"lunch": "1s"}}, "budgets.lunch: expected one of accept, ingress"),
    "windows as a list": ({"objectives": [TTFT], "windows": ["standard"]}, "`windows`: expected one of"),
    "kind as a list": ({"objectives": [{**TTFT, "of": ["ttft"]}]}, "objectives[0].of: expected one of"),
    "not a URL": ({"objectives": [TTFT], "grafana": "there"}, "`grafana`: expected an address with http"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), BAD.values(), ids=BAD)
def test_invalid_value_names_its_place_and_expectation(content: Any, expected: str) -> None:
    with pytest.raises(slo_spec.InvalidSloSpec) as error:
        slo_spec.parse_spec(content)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    "text", ["objectives: [", "objectives: 2024-02-30"], ids=["unclosed list", "invalid date"]
)
def test_invalid_yaml_names_the_file(tmp_path: Any, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "slo.yaml").write_text(text)
    assert cli.main(["alerts", "build", str(tmp_path / "slo.yaml")]) == 2
    assert f"{tmp_path / 'slo.yaml'} is not valid YAML" in capsys.readouterr().err


def test_whole_bounds_match_both_notations() -> None:
    objective = slo_spec.parse_spec({"objectives": [{**TTFT, "within": "1s"}]}).objectives[0]
    assert 'le=~"1([.]0)?"' in burn_rate_rules.missed_ratio_query(objective, "5m")


def test_every_default_bound_is_a_histogram_bound() -> None:
    for objective in slo_spec.DEFAULT_SPEC.objectives:
        assert (
            objective.of == slo_spec.ERRORS
            or objective.within in slo_spec.OBJECTIVE_METRICS[objective.of].bounds
        )
    assert set(slo_spec.DEFAULT_SPEC.budgets) <= set(semconv.STAGES)


def test_grafana_rules_expand_the_recording_rules() -> None:
    prometheus_rules = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)
    found = [
        rule
        for group in grafana_rules.convert_rule_groups(prometheus_rules, "prom")
        for rule in group["rules"]
    ]
    alerts = [rule for group in prometheus_rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(found) == len(alerts)
    assert len({rule["uid"] for rule in found}) == len({rule["title"] for rule in found}) == len(found)
    queries = [rule["data"][0]["model"]["expr"] for rule in found]
    assert not any("otel_infer:" in expr for expr in queries)
    assert all(len(rule["uid"]) <= 40 for rule in found)


def test_burn_rate_threshold_never_exceeds_all_requests() -> None:
    """14.4 times an error budget of 10 % is more than all requests, so the threshold is lower."""
    thresholds = {
        share: _burn_thresholds({"name": "a", "of": "errors", "share": share})
        for share in ("99%", "90%", "80%", "5%")
    }
    assert thresholds == {
        "99%": ["14.4 * 0.01", "6 * 0.01", "3 * 0.01", "1 * 0.01"],
        "90%": ["9 * 0.1", "6 * 0.1", "3 * 0.1", "1 * 0.1"],
        "80%": ["4.5 * 0.2", "4.5 * 0.2", "3 * 0.2", "1 * 0.2"],
        "5%": ["1 * 0.95", "1 * 0.95", "1 * 0.95", "1 * 0.95"],
    }


def _burn_thresholds(objective: dict[str, Any]) -> list[str]:
    groups = burn_rate_rules.build_rule_groups(slo_spec.parse_spec({"objectives": [objective]}))
    burns = [
        rule["expr"]
        for group in groups["groups"]
        for rule in group["rules"]
        if "Burn" in rule.get("alert", "")
    ]
    return [burn.split(" > ")[1].split(" and ")[0] for burn in burns]


def test_short_windows_have_a_minimum_range() -> None:
    groups = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC._replace(windows=slo_spec.DEMO_WINDOWS))
    (causes,) = (group for group in groups["groups"] if "causes" in group["name"])
    ranges = {int(found) for rule in causes["rules"] for found in re.findall(r"\[(\d+)s", rule["expr"])}
    assert min(ranges) == burn_rate_rules.MIN_RANGE_S
