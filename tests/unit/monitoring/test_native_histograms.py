"""Queries of dashboards and rules for native histograms, which have no `_bucket`, `_sum` and `_count`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from otel_infer.monitoring import dashboards, native_histograms
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from otel_infer.monitoring.dashboards.dashboard import resolve_variables

TTFT = "gen_ai_server_time_to_first_token_seconds"
CASES = {
    f"histogram_quantile(0.99, sum by (le, infer_stage) (rate({TTFT}_bucket{{job=~\"a\"}}[5m])))":
        f"histogram_quantile(0.99, sum by (infer_stage) (rate({TTFT}{{job=~\"a\"}}[5m])))",
    f"sum by (le) (increase({TTFT}_bucket[5m]))": f"sum (increase({TTFT}[5m]))",
    f"sum (rate({TTFT}_count{{m=\"a}}b\"}}[5m] offset 10m))":
        f"sum (histogram_count(rate({TTFT}{{m=\"a}}b\"}}[5m] offset 10m)))",
    f"sum by (job) (rate({TTFT}_bucket{{le=\"0.5\"}}[5m]))":
        f"(histogram_fraction(0, 0.5, sum by (job) (rate({TTFT}[5m]))) * "
        f"histogram_count(sum by (job) (rate({TTFT}[5m]))))",
    f"sum (rate({TTFT}_bucket{{a=\"b\",le=~\"1([.]0)?\"}}[5m]))":
        f"(histogram_fraction(0, 1, sum (rate({TTFT}{{a=\"b\"}}[5m]))) * "
        f"histogram_count(sum (rate({TTFT}{{a=\"b\"}}[5m]))))",
    f"{TTFT}_count unless max_over_time({TTFT}_count[1h] offset 10m)":
        f"histogram_count({TTFT}) unless count_over_time({TTFT}[1h] offset 10m)",
    "rate(infer_self_lost_total[5m])": "rate(infer_self_lost_total[5m])",
}  # fmt: skip


@pytest.mark.parametrize(("classic", "native"), CASES.items())
def test_a_query_asks_native_histograms(classic: str, native: str) -> None:
    assert native_histograms.convert_query(classic) == native


def iter_values(document: Any, *keys: str) -> Iterator[str]:
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if key in keys and isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            yield from iter_values(value, *keys)


RULES = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)


@pytest.mark.parametrize("document", [dashboards.build_dashboards(), RULES], ids=["dashboards", "rules"])
def test_no_query_asks_a_classic_histogram(document: Any) -> None:
    classic = {
        family + ending
        for family in native_histograms.HISTOGRAM_FAMILIES
        for ending in ("_bucket", "_sum", "_count")
    }
    converted = list(iter_values(native_histograms.convert_queries(document), "expr", "query", "definition"))
    assert len(converted) > 80
    assert [text for text in converted if any(name in text for name in classic)] == []
    for expr in iter_values(native_histograms.convert_queries(document), "expr"):
        promql_parser.parse(resolve_variables(expr, "5m"))
