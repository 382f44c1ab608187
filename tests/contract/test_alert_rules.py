"""Each alert fires on a fault, stays inactive without one, and resolves afterwards (checked with promtool)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from otel_infer import semconv
from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from otel_infer.sidecar.recording.window import WINDOW_NS
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
"""Each counter's increase per second. A name that starts with `=` is a gauge with its value."""


class Case(NamedTuple):
    """Series with a fault and without one."""

    faulty: Series
    healthy: Series


def requests(rate: float = 1, fast: float = 1, failed: float = 0) -> Series:
    """Returns series of requests. `fast` is the share with a TTFT within 500 ms."""
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
    """Returns series of 100 decode steps/s within 25 ms, and `slow` steps/s that take up to 1 s."""
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
BREAKDOWN = "infer_latency_duration_seconds_total"
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
        both(grows(BREAKDOWN, INTERFERENCE, 1), grows(BREAKDOWN, OWN, 1)),
        both(grows(BREAKDOWN, INTERFERENCE, 0.1), grows(BREAKDOWN, OWN, 1)),
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
    "ServerHangs": Case(
        state("infer_request_hung", J, 3),
        state("infer_request_hung", J, 0),
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
    "SidecarRestarted": Case(
        grows("infer_self_restarts_total", J, 0.01), grows("infer_self_restarts_total", J, 0)
    ),
    "HookFailed": Case(grows("infer_self_errors_total", J, 0.01), grows("infer_self_errors_total", J, 0)),
    "HooksMissing": Case(
        state("infer_self_hooks", f'{J},infer_integration="vllm",infer_hook_state="missing"', 2),
        state("infer_self_hooks", f'{J},infer_integration="vllm",infer_hook_state="missing"', 0),
    ),
}
"""Alerts on a constant rate or state. The others have tests of their own below."""
FAULTY_MIN, HEALTHY_MIN = 60, 420
"""Minutes with a fault, and minutes without one afterwards."""


def input_series(series: Series, count: int, *, after: Series | None = None) -> list[dict[str, str]]:
    """Returns promtool's input series: `count` minutes of `series`, then seven hours of `after`."""
    found = []
    for name, value in series.items():
        later = (after or {}).get(name, 0 if name.startswith("=") else value)
        if name.startswith("="):
            text = f"{value:g}x{count}" + (f" {later:g}x{HEALTHY_MIN}" if after is not None else "")
        else:
            begin = value * 60
            text = f"0+{begin:g}x{count}"
            if after is not None:
                text += f" {begin * count:g}+{later * 60:g}x{HEALTHY_MIN}"
        found.append({"series": name.removeprefix("="), "values": text})
    return found


def firing(alert: str, at: str, count: int | None) -> dict[str, Any]:
    samples = [] if count is None else [{"labels": "{}", "value": count}]
    expr = f'count(count by (alertname) (ALERTS{{alertname="OtelInfer{alert}",alertstate="firing"}}))'
    return {"expr": expr, "eval_time": at, "exp_samples": samples}


def isolate_alert(alert: str) -> dict[str, Any]:
    """Returns the group of this alert without other alerts, evaluated once a minute."""
    for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]:
        if any(rule.get("alert") == f"OtelInfer{alert}" for rule in group["rules"]):
            rules = [
                rule
                for rule in group["rules"]
                if rule.get("alert", alert).endswith(alert) or "record" in rule
            ]
            return {"groups": [{**group, "interval": "1m", "rules": rules}]}
    raise KeyError(alert)


def run_promtool(folder: Path, alert: str, tests: list[dict[str, Any]]) -> None:
    (folder / "rules.yml").write_text(rules_to_yaml(isolate_alert(alert)))
    file = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(file, sort_keys=False))
    completed = subprocess.run(
        [tool("promtool"), "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]


@pytest.mark.parametrize(("alert", "case"), CASES.items(), ids=CASES)
def test_an_alert_fires_only_during_its_fault(tmp_path: Path, alert: str, case: Case) -> None:
    after = dict.fromkeys(case.faulty, 0.0)
    after.update({name: value for name, value in case.healthy.items() if name in case.faulty})
    faulty = {"interval": "1m", "input_series": input_series(case.faulty, FAULTY_MIN, after=after)}
    healthy = {"interval": "1m", "input_series": input_series(case.healthy, FAULTY_MIN)}
    run_promtool(
        tmp_path,
        alert,
        [
            {**faulty, "promql_expr_test": [firing(alert, "55m", 1), firing(alert, "7h45m", None)]},
            {**healthy, "promql_expr_test": [firing(alert, "55m", None)]},
        ],
    )


def test_queue_growing_fires_only_while_the_queue_grows(tmp_path: Path) -> None:
    name = f'infer_request_active{{{J},infer_request_state="queued"}}'
    growing = {"interval": "1m", "input_series": [{"series": name, "values": "0+4x30 0x30"}]}
    standing = {"interval": "1m", "input_series": [{"series": name, "values": "50x30"}]}
    run_promtool(
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


GONE = {
    "killed": ({"i": "0x20 _x30"}, 1),
    "killed with its sidecar, before it reported": ({}, 1),
    "stopped": ({"i": "0x19 1 _x30"}, None),
    "one of two killed": ({"i": "0x19 1 _x30", "j": "0x20 _x30"}, 1),
    "killed after an earlier instance was stopped": ({"h": "0x5 1 _x44", "i": "0x20 _x30"}, 1),
}


@pytest.mark.parametrize(("stopped", "fires"), GONE.values(), ids=GONE)
def test_a_gone_server_fires_unless_it_was_stopped(
    tmp_path: Path, stopped: dict[str, str], fires: int | None
) -> None:
    """It fires until its series expire."""
    present = {"series": f"infer_self_memory_usage_bytes{{{J}}}", "values": "1x20 _x30"}
    states = [
        {"series": f'infer_server_stopped{{job="s",instance="{instance}"}}', "values": values}
        for instance, values in stopped.items()
    ]
    expected = [("15m", None), ("28m", fires), ("45m", None)]
    run_promtool(
        tmp_path,
        "ServerGone",
        [
            {
                "interval": "1m",
                "input_series": [present, *states],
                "promql_expr_test": [firing("ServerGone", *each) for each in expected],
            }
        ],
    )


FIRST_EVENTS = {
    "OutOfDeviceMemory": f'infer_marks_total{{{J},infer_mark_name="allocator_oom"}}',
    "GpuXid": f'hw_errors_total{{{G},error_type="xid_79"}}',
}


@pytest.mark.parametrize("alert", FIRST_EVENTS)
def test_the_first_event_of_a_new_series_fires(tmp_path: Path, alert: str) -> None:
    series = {"interval": "1m", "input_series": [{"series": FIRST_EVENTS[alert], "values": "_x20 1x40"}]}
    run_promtool(
        tmp_path,
        alert,
        [{**series, "promql_expr_test": [firing(alert, "22m", 1), firing(alert, "50m", None)]}],
    )


def seconds(length: str) -> int:
    return int(length[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[length[-1]]


def list_alerts(**changes: Any) -> list[dict[str, Any]]:
    groups = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC._replace(**changes))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("windows", slo_spec.WINDOW_SETS.values(), ids=slo_spec.WINDOW_SETS)
def test_an_alert_is_pending_for_less_than_its_window(windows: Any) -> None:
    """Otherwise a single burst leaves the window before the alert fires."""
    for rule in list_alerts(windows=windows):
        ranges = re.findall(r"\[(\d+[smhd])[\]:]|ratio_rate(\d+[smhd])", rule["expr"])
        shortest = min((seconds(a or b) for a, b in ranges), default=None)
        assert shortest is None or seconds(rule.get("for", "0s")) < shortest, rule["alert"]


def test_a_page_fires_while_its_beginning_is_recorded() -> None:
    """The flight recorder holds a page's pending period and 60 s for rates, evaluation and delivery."""
    pages = [rule for rule in list_alerts() if rule["labels"]["severity"] == "page"]
    assert len(pages) > 8
    assert max(seconds(rule.get("for", "0s")) for rule in pages) + 60 <= WINDOW_NS / 1e9


LOSSES = [reason for reason in semconv.LOSS_REASONS if reason not in ("steps_over_budget", "values_cut")]


@pytest.mark.parametrize("reason", LOSSES)
def test_one_burst_of_losses_fires(tmp_path: Path, reason: str) -> None:
    """The series is there with 0, rises once, and then stays."""
    name = f'infer_self_lost_total{{{J},infer_loss_reason="{reason}"}}'
    series = {"interval": "1m", "input_series": [{"series": name, "values": "0x30 3393x60"}]}
    expected = [("29m", None), ("33m", 1), ("50m", None)]
    run_promtool(
        tmp_path,
        "TelemetryDropping",
        [{**series, "promql_expr_test": [firing("TelemetryDropping", *each) for each in expected]}],
    )


ONE_EVENT = {
    "OutOfDeviceMemory": f'infer_marks_total{{{J},infer_mark_name="allocator_oom"}}',
    "DeviceMemoryShort": f'infer_marks_total{{{J},infer_mark_name="allocator_retry"}}',
    "GpuMemoryErrors": f'hw_errors_total{{{G},error_type="uncorrected"}}',
    "SidecarRestarted": f"infer_self_restarts_total{{{J}}}",
    "HookFailed": f"infer_self_errors_total{{{J}}}",
}


@pytest.mark.parametrize("alert", ONE_EVENT)
def test_one_event_fires(tmp_path: Path, alert: str) -> None:
    """The series is there with 0, rises by one, and then stays."""
    series = {"interval": "1m", "input_series": [{"series": ONE_EVENT[alert], "values": "0x30 1x60"}]}
    expected = [("29m", None), ("38m", 1), ("55m", None)]
    run_promtool(
        tmp_path, alert, [{**series, "promql_expr_test": [firing(alert, *each) for each in expected]}]
    )


@pytest.mark.parametrize("error", ["ValueError", "timeout", "process_died", "_OTHER"])
def test_one_burst_of_errors_burns_the_budget(tmp_path: Path, error: str) -> None:
    """The first failures of a server end within one scrape. Their series begins with 0."""
    success = {"series": f"{E2E}_count{{{M}}}", "values": "0+60x150"}
    failures = {"series": f'{E2E}_count{{{M},error_type="{error}"}}', "values": "_x59 0 1500x90"}
    expected = [("59m", None), ("63m", 1)]
    series = {"interval": "1m", "input_series": [success, failures]}
    run_promtool(
        tmp_path,
        "ErrorsBudgetBurn",
        [{**series, "promql_expr_test": [firing("ErrorsBudgetBurn", *each) for each in expected]}],
    )


@pytest.mark.parametrize(
    "afterwards", ["3600x60", "stale _x60"], ids=["no requests", "restarted without requests"]
)
def test_no_traffic_fires_after_earlier_traffic(tmp_path: Path, afterwards: str) -> None:
    name, memory = f"{E2E}_count{{{M}}}", f"infer_self_memory_usage_bytes{{{M}}}"
    series = [{"series": name, "values": f"0+60x60 {afterwards}"}, {"series": memory, "values": "1x120"}]
    run_promtool(
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
    run_promtool(
        tmp_path,
        "TTFTBudgetBurn",
        [
            {
                "interval": "1m",
                "input_series": input_series(requests(rate=0.01, fast=0), FAULTY_MIN),
                "promql_expr_test": [firing("TTFTBudgetBurn", "55m", None)],
            }
        ],
    )


def test_the_watchdog_always_fires(tmp_path: Path) -> None:
    run_promtool(
        tmp_path,
        "Watchdog",
        [{"interval": "1m", "input_series": [], "promql_expr_test": [firing("Watchdog", "1m", 1)]}],
    )


def test_every_alert_has_a_test() -> None:
    alerts = {
        rule["alert"].removeprefix("OtelInfer")
        for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {*CASES, "QueueGrowing", "ServerGone", "NoTraffic", "Watchdog"} == alerts


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(
        rules_to_yaml(burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC))
    )
    completed = subprocess.run(
        [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", "rules.yml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
