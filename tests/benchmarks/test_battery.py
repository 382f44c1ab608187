"""The battery of faults: what is drawn, what is right, and the bars of its table."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.battery import table
from benchmarks.battery.faults import ALL, FAULTS
from benchmarks.battery.servers import SERVERS
from otel_infer.analysis.diagnosis.rules import HEALTHY, INSUFFICIENT
from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from scripts.docs_pages.battery import build_battery_section

CELLS = [(fault, server) for fault, row in FAULTS.items() for server in row.servers]


def make_report(verdict: str, **causes_ms: float) -> dict[str, Any]:
    return {"verdict": verdict, "worst": [{"duration_ms": 100.0, "causes_ms": causes_ms}]}


def make_outcome(fault: str, verdict: str, server: str = "generate-threads") -> dict[str, Any]:
    right = table.is_right(fault, make_report(verdict))
    return {"server": server, "fault": fault, "verdict": verdict, "right": right}


def test_right_verdicts_exist() -> None:
    for row in FAULTS.values():
        assert set(row.verdicts) <= {HEALTHY, *SYMPTOMS}
        assert INSUFFICIENT not in row.verdicts
        assert set(row.servers) <= set(ALL) == set(SERVERS)


@pytest.mark.parametrize(("fault", "server"), CELLS)
def test_draw_is_random_and_repeatable(fault: str, server: str) -> None:
    draws = [FAULTS[fault].draw(random.Random(seed), SERVERS[server]) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0].requests) >= 5
    assert SERVERS[server].has_mistakes or not draws[0].mistakes


@pytest.mark.parametrize("name", table.HEALTHY)
def test_healthy_draw_has_no_mistake(name: str) -> None:
    case = FAULTS[name].draw(random.Random(1), SERVERS["generate-threads"])
    assert not case.mistakes and not case.database_s and (not case.hogs or case.niceness == 19)


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([make_outcome("lock", "queueing")] * 10, 0),
        ([make_outcome("lock", "queueing")] * 7 + [make_outcome("lock", "healthy")] * 3, 1),
        ([make_outcome("lock", "queueing"), *[make_outcome("nothing", "healthy")] * 20], 0),
        ([make_outcome("lock", "queueing"), *[make_outcome("nothing", "stutter")] * 2], 1),
        (
            [
                make_outcome("lock", "queueing"),
                *[make_outcome("hogs", "not_enough_cpu")] * 9,
                make_outcome("slow end", "healthy"),
            ],
            1,
        ),
    ],
    ids=["all right", "one fault below its bar", "no alarm", "false alarms", "one fault never right"],
)
def test_table_holds_its_bars(
    outcomes: list[dict[str, Any]], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.print_table(outcomes) == status
    printed = capsys.readouterr().out
    assert "macro recall" in printed and "false alarms" in printed


@pytest.mark.parametrize(("starved_ms", "right"), [(4.0, False), (6.0, True)])
def test_without_a_fault_cpu_is_short_if_requests_wait_for_it(starved_ms: float, right: bool) -> None:
    report = make_report("not_enough_cpu", starved=starved_ms)
    assert table.is_right("nothing", report) == table.is_right("nothing, busy machine", report) == right


@pytest.mark.parametrize(("server", "above"), [("embeddings", 94), ("vllm", 97)])
def test_requests_with_much_unexplained_time_are_counted(server: str, above: int) -> None:
    report = make_report("healthy")
    report["worst"] = [{"duration_ms": 100.0, "causes_ms": {"unexplained": share}} for share in range(100)]
    assert table.count_unexplained(report, server) == above


@pytest.mark.parametrize(("unexplained", "verdict"), [(3, "pass"), (4, "fail")])
def test_bar_of_unexplained_time_is_that_of_all_draws_with_a_fault(
    unexplained: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [make_outcome("lock", "queueing") for _ in range(2)]
    drawn[0] |= {"largest": True, "requests": 30, "unexplained": unexplained}
    drawn[1] |= {"largest": True, "requests": 30, "unexplained": 0}
    table.print_table(drawn)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "unexplained" in line]
    assert line.endswith(verdict)


def test_verdict_has_the_largest_share() -> None:
    findings = [{"weight": 0.4}, {"weight": 0.3}]
    assert table.has_largest_share({"findings": findings})
    assert not table.has_largest_share({"findings": findings[::-1]})


def test_table_of_docs_names_wrong_verdicts(tmp_path: Path) -> None:
    results = tmp_path / "battery.json"
    assert "no result is committed" in build_battery_section(results)
    results.write_text(json.dumps([make_outcome("lock", "queueing"), make_outcome("lock", "healthy")]))
    section = build_battery_section(results)
    assert "| lock | `queueing`, `peak`, `head_of_line_blocking` | 1 of 2 (else `healthy`) |" in section
    assert "Not drawn yet: " in section and "vLLM on a CPU" in section
