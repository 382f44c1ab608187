"""Each alert, with promtool: it fires where it should, is silent where nothing is wrong, and is over afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from tests.stack.tools import tool

J = 'job="s",instance="i"'
M = f'{J},gen_ai_request_model="m"'
E = f'{J},infer_engine="0",process_pid="7"'
G = f'{J},hw_id="GPU-1",hw_name="GPU 0"'
TTFT, E2E = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds"
STEP = "infer_step_duration_seconds"
DECODE = f'{E},infer_step_kind="decode",infer_clock="host"'
SLOW = "infer_latency_slow_duration_seconds_total"

Series = Mapping[str, float]
"""Growth a second of each series; of a gauge, its value (`=` before the name)."""


class Case(NamedTuple):
    """Series while it is wrong, and while it is not."""

    bad: Series
    good: Series


def requests(rate: float = 1, fast: float = 1, failed: float = 0) -> Series:
    """`fast`: share with a TTFT within 500 ms."""
    return {
        f'{TTFT}_bucket{{{M},le="0.5"}}': rate * fast,
        f"{TTFT}_count{{{M}}}": rate,
        f"{TTFT}_sum{{{M}}}": rate * 0.3,
        f"{E2E}_count{{{M}}}": rate * (1 - failed),
        f'{E2E}_count{{{M},error_type="ValueError"}}': rate * failed,
        f'{E2E}_bucket{{{M},le="40.96"}}': rate * fast,
    }


def gaps(fast: float) -> Series:
    name = "infer_inter_token_latency_seconds"
    return {f'{name}_bucket{{{M},le="0.05"}}': 50 * fast, f"{name}_count{{{M}}}": 50}


def steps(slow: float) -> Series:
    """A hundred decode steps a second within 25 ms, and so many that take up to 1 s."""
    fast = {f'{STEP}_bucket{{{DECODE},le="0.025"}}': 100.0, f'{STEP}_bucket{{{DECODE},le="1.0"}}': 100 + slow}
    return {
        **fast,
        f'{STEP}_bucket{{{DECODE},le="+Inf"}}': 100 + slow,
        f"{STEP}_count{{{DECODE}}}": 100 + slow,
    }


def state(name: str, labels: str, value: float) -> Series:
    return {f"={name}{{{labels}}}": value}


def grows(name: str, labels: str, rate: float) -> Series:
    return {f"{name}{{{labels}}}": rate}


def causes(**rates: float) -> Series:
    return {f'{SLOW}{{{M},infer_latency_cause="{cause}"}}': rate for cause, rate in rates.items()}


def both(*parts: Series) -> Series:
    return {name: value for part in parts for name, value in part.items()}


PREEMPTIONS = "infer_request_preemptions_total"
BLAME = "infer_latency_duration_seconds_total"
STAGE = "infer_stage_duration_seconds_sum"
EXECUTION, GAP = "infer_step_execution_duration_seconds_sum", "infer_step_device_gap_seconds_sum"
ABANDONED = "infer_request_abandoned_seconds_count"
QUEUE, LEFT = f'{M},infer_stage="queue"', f'{M},error_type="client_disconnect"'
DEVICE = f'{E},infer_clock="device",infer_worker_rank="0"'
WAITS = f'{J},infer_request_state="queued"'
INTERFERENCE, OWN = f'{M},infer_latency_cause="interference"', f'{M},infer_latency_cause="decode"'

CASES: dict[str, Case] = {
    "TTFTBudgetBurn": Case(requests(fast=0.5), requests(fast=1)),
    "ITLBudgetBurn": Case(gaps(0.5), gaps(1)),
    "E2EBudgetBurn": Case(requests(fast=0.5), requests(fast=1)),
    "ErrorsBudgetBurn": Case(requests(failed=0.5), requests(failed=0)),
    "QueueDominatesTTFT": Case(
        both(requests(), grows(STAGE, QUEUE, 0.25)), both(requests(), grows(STAGE, QUEUE, 0.05))
    ),
    "KVCachePressure": Case(
        both(state("infer_kv_cache_utilization_ratio", E, 0.99), grows(PREEMPTIONS, M, 0.02)),
        both(state("infer_kv_cache_utilization_ratio", E, 0.99), grows(PREEMPTIONS, M, 0)),
    ),
    "PreemptionStorm": Case(
        both(requests(), grows(PREEMPTIONS, M, 0.5)), both(requests(), grows(PREEMPTIONS, M, 0.05))
    ),
    "CauseDominates": Case(causes(decode=1, gc=1), causes(decode=1, prefill=1, gc=0.01)),
    "Interference": Case(
        both(grows(BLAME, INTERFERENCE, 1), grows(BLAME, OWN, 1)),
        both(grows(BLAME, INTERFERENCE, 0.1), grows(BLAME, OWN, 1)),
    ),
    "DecodeStall": Case(steps(5), steps(0)),
    "HostBound": Case(
        both(grows(GAP, E, 1), grows(EXECUTION, DEVICE, 1), state("infer_request_active", WAITS, 3)),
        both(grows(GAP, E, 1), grows(EXECUTION, DEVICE, 1), state("infer_request_active", WAITS, 0)),
    ),
    "ColdPaths": Case(
        both(
            requests(), grows("infer_pause_duration_seconds_count", f'{J},infer_pause_cause="compile"', 0.01)
        ),
        both(requests(), grows("infer_pause_duration_seconds_count", f'{J},infer_pause_cause="gc"', 0.01)),
    ),
    "OutOfDeviceMemory": Case(
        grows("infer_marks_total", f'{J},infer_mark_name="allocator_oom"', 0.01),
        grows("infer_marks_total", f'{J},infer_mark_name="allocator_oom"', 0),
    ),
    "DeviceMemoryShort": Case(
        grows("infer_marks_total", f'{J},infer_mark_name="allocator_retry"', 0.01),
        grows("infer_marks_total", f'{J},infer_mark_name="empty_step"', 0.01),
    ),
    "ClientsLeave": Case(
        both(requests(), grows(ABANDONED, LEFT, 0.5)), both(requests(), grows(ABANDONED, LEFT, 0.01))
    ),
    "GpuThrottled": Case(
        state("infer_gpu_throttled_ratio", f'{G},infer_gpu_throttle_reason="hw_thermal"', 1),
        state("infer_gpu_throttled_ratio", f'{G},infer_gpu_throttle_reason="power_cap"', 1),
    ),
    "GpuMemoryErrors": Case(
        grows("hw_errors_total", f'{G},error_type="uncorrected"', 0.01),
        grows("hw_errors_total", f'{G},error_type="corrected"', 0.01),
    ),
    "GpuXid": Case(
        grows("hw_errors_total", f'{G},error_type="xid_79"', 0.01),
        grows("hw_errors_total", f'{G},error_type="corrected"', 0.01),
    ),
    "TelemetryDropping": Case(
        grows("infer_self_lost_total", f'{J},infer_loss_reason="events_overwritten"', 1),
        grows("infer_self_lost_total", f'{J},infer_loss_reason="steps_over_budget"', 1),
    ),
    "HooksMissing": Case(
        state("infer_self_hooks", f'{J},infer_integration="vllm",infer_hook_state="missing"', 2),
        state("infer_self_hooks", f'{J},infer_integration="vllm",infer_hook_state="missing"', 0),
    ),
}
"""Those that follow from a rate or a state that goes on; the others are below."""
HOUR, OVER = 60, 420
"""Minutes: so long it is wrong, and so long it is well afterwards."""


def told(series: Series, count: int, *, after: Series | None = None) -> list[dict[str, str]]:
    """As promtool wants them: for so many minutes, and then as `after` for seven hours."""
    found = []
    for name, value in series.items():
        later = (after or {}).get(name, 0 if name.startswith("=") else value)
        if name.startswith("="):
            text = f"{value:g}x{count}" + (f" {later:g}x{OVER}" if after is not None else "")
        else:
            begin = value * 60
            text = f"0+{begin:g}x{count}"
            if after is not None:
                text += f" {begin * count:g}+{later * 60:g}x{OVER}"
        found.append({"series": name.removeprefix("="), "values": text})
    return found


def firing(alert: str, at: str, count: int | None) -> dict[str, Any]:
    samples = [] if count is None else [{"labels": "{}", "value": count}]
    expr = f'count(count by (alertname) (ALERTS{{alertname="OtelInfer{alert}",alertstate="firing"}}))'
    return {"expr": expr, "eval_time": at, "exp_samples": samples}


def about(alert: str) -> dict[str, Any]:
    """The group of this alert, without other causes, evaluated once a minute."""
    for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]:
        if any(rule.get("alert") == f"OtelInfer{alert}" for rule in group["rules"]):
            kept = [
                rule
                for rule in group["rules"]
                if rule.get("alert", alert).endswith(alert) or "record" in rule
            ]
            return {"groups": [{**group, "interval": "1m", "rules": kept}]}
    raise KeyError(alert)


def ran(folder: Path, alert: str, tests: list[dict[str, Any]]) -> None:
    (folder / "rules.yml").write_text(rules_to_yaml(about(alert)))
    file = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(file, sort_keys=False))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(("alert", "case"), CASES.items(), ids=CASES)
def test_an_alert_fires_where_it_should_stays_silent_and_is_over(
    tmp_path: Path, alert: str, case: Case
) -> None:
    after = dict.fromkeys(case.bad, 0.0)
    after.update({name: value for name, value in case.good.items() if name in case.bad})
    wrong = {"interval": "1m", "input_series": told(case.bad, HOUR, after=after)}
    well = {"interval": "1m", "input_series": told(case.good, HOUR)}
    ran(
        tmp_path,
        alert,
        [
            {**wrong, "promql_expr_test": [firing(alert, "55m", 1), firing(alert, "7h45m", None)]},
            {**well, "promql_expr_test": [firing(alert, "55m", None)]},
        ],
    )


def test_a_queue_that_grows_is_told_and_one_that_stands_is_not(tmp_path: Path) -> None:
    name = f'infer_request_active{{{J},infer_request_state="queued"}}'
    growing = {"interval": "1m", "input_series": [{"series": name, "values": "0+4x30 0x30"}]}
    standing = {"interval": "1m", "input_series": [{"series": name, "values": "50x30"}]}
    ran(
        tmp_path,
        "QueueGrowing",
        [
            {
                **growing,
                "promql_expr_test": [firing("QueueGrowing", "25m", 1), firing("QueueGrowing", "55m", None)],
            },
            {**standing, "promql_expr_test": [firing("QueueGrowing", "25m", None)]},
        ],
    )


def test_a_server_that_is_gone_is_told_until_it_is_forgotten(tmp_path: Path) -> None:
    there = {"series": f"infer_self_memory_usage_bytes{{{J}}}", "values": "1x20 _x30"}
    ran(
        tmp_path,
        "ServerGone",
        [
            {
                "interval": "1m",
                "input_series": [there],
                "promql_expr_test": [
                    firing("ServerGone", "15m", None),
                    firing("ServerGone", "28m", 1),
                    firing("ServerGone", "45m", None),
                ],
            }
        ],
    )


FIRST = {
    "OutOfDeviceMemory": f'infer_marks_total{{{J},infer_mark_name="allocator_oom"}}',
    "GpuXid": f'hw_errors_total{{{G},error_type="xid_79"}}',
}


@pytest.mark.parametrize("alert", FIRST)
def test_what_happens_once_and_has_no_series_before_is_told(tmp_path: Path, alert: str) -> None:
    once = {"interval": "1m", "input_series": [{"series": FIRST[alert], "values": "_x20 1x40"}]}
    ran(
        tmp_path, alert, [{**once, "promql_expr_test": [firing(alert, "22m", 1), firing(alert, "50m", None)]}]
    )


@pytest.mark.parametrize(
    "afterwards", ["3600x60", "stale _x60"], ids=["silent", "restarted, and nobody came"]
)
def test_no_traffic_is_told_where_there_was_some(tmp_path: Path, afterwards: str) -> None:
    name, there = f"{E2E}_count{{{M}}}", f"infer_self_memory_usage_bytes{{{M}}}"
    series = [{"series": name, "values": f"0+60x60 {afterwards}"}, {"series": there, "values": "1x120"}]
    ran(
        tmp_path,
        "NoTraffic",
        [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [firing("NoTraffic", "55m", None), firing("NoTraffic", "95m", 1)],
            }
        ],
    )


def test_little_traffic_burns_no_budget(tmp_path: Path) -> None:
    ran(
        tmp_path,
        "TTFTBudgetBurn",
        [
            {
                "interval": "1m",
                "input_series": told(requests(rate=0.01, fast=0), HOUR),
                "promql_expr_test": [firing("TTFTBudgetBurn", "55m", None)],
            }
        ],
    )


def test_the_watchdog_fires_always(tmp_path: Path) -> None:
    ran(
        tmp_path,
        "Watchdog",
        [{"interval": "1m", "input_series": [], "promql_expr_test": [firing("Watchdog", "1m", 1)]}],
    )


def test_every_alert_is_tried() -> None:
    alerts = {
        rule["alert"].removeprefix("OtelInfer")
        for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {*CASES, "QueueGrowing", "ServerGone", "NoTraffic", "Watchdog"} == alerts


def test_promtool_finds_the_rules_in_order(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(
        rules_to_yaml(burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC))
    )
    done = subprocess.run(
        [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", "rules.yml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
