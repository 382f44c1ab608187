"""The verdicts on a whole server, and results that are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import verdict
from benchmarks.verdict import Figure
from benchmarks.whole import lines, measurement, servers
from benchmarks.whole.load import Block
from benchmarks.whole.measurement import ServerResult

STREAMS = servers.ServedLoad("s", "a server, 8 streams", (), "streams", 8, {})
REQUESTS = servers.ServedLoad("r", "a batcher", (), "requests", 200, {}, is_cpu_gated=True)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (Figure(0.4, -0.2, 0.9), verdict.PASS),
        (Figure(0.9, 0.3, 1.6), verdict.PASS),
        (Figure(1.2, 0.1, 2.1), verdict.FAIL),
        (Figure(5.0, 0.1, 60.0), verdict.FAIL),
        (Figure(1.2, -0.1, 1.8), verdict.INCONCLUSIVE),
        (Figure(0.2, -1.5, 1.5), verdict.INCONCLUSIVE),
        (Figure(0.2, float("nan"), float("nan")), verdict.INCONCLUSIVE),
    ],
)
def test_a_loss_fails_by_its_estimate_if_it_is_above_zero(figure: Figure, expected: str) -> None:
    assert lines.judge_estimate(figure, 1.0) == expected


def make_result(slower: float, ours: int = 50, sidecar: float = 0.008, rounds: int = 20) -> ServerResult:
    off = {
        "rate": 1000.0,
        "cpu": 1e-3,
        "gap_p50": 0.01,
        "gap_p99": 0.02,
        "first_p50": 0.05,
        "first_p99": 0.1,
        "errors": 0,
    }
    on = {name: value / slower if name == "rate" else value * slower for name, value in off.items()}
    samples = {
        "total": 10_000,
        "ours": ours,
        "hooks": {"put (serve.py)": ours},
        "functions": {},
        "processes": {"process 1": [10_000, ours]},
        "missing": "",
    }
    return ServerResult(
        "x", [sidecar] * 6, samples, running_samples=samples, rounds=[{"on": on, "off": off}] * rounds
    )


def read_verdicts(served: servers.ServedLoad, result: ServerResult, is_quick: bool = False) -> dict[str, str]:
    rows = lines.make_lines(served, result, is_quick)
    return {line.claim.partition(": ")[2]: line.verdict for line in rows}


def test_every_gate_of_a_cheap_server_passes() -> None:
    verdicts = read_verdicts(STREAMS, make_result(1.005))
    assert verdicts.pop("CPU of the server per token") == verdict.INFORMATION
    assert set(verdicts.values()) == {verdict.PASS}
    assert len(verdicts) == 6
    assert lines.are_rounds_conclusive(STREAMS, make_result(1.005))


def test_every_gate_of_an_expensive_server_fails() -> None:
    verdicts = read_verdicts(STREAMS, make_result(1.05, ours=81, sidecar=0.011))
    assert verdicts.pop("CPU of the server per token") == verdict.INFORMATION
    assert set(verdicts.values()) == {verdict.FAIL}


def test_requests_have_a_gate_on_cpu_time_and_no_gaps() -> None:
    assert read_verdicts(REQUESTS, make_result(1.03))["CPU of the server per request"] == verdict.PASS
    verdicts = read_verdicts(REQUESTS, make_result(1.05))
    assert verdicts["CPU of the server per request"] == verdict.FAIL
    assert not [claim for claim in verdicts if "gap" in claim]


def test_a_quick_run_has_no_conclusion() -> None:
    result = make_result(1.005)
    result.samples["total"] = 500
    verdicts = read_verdicts(STREAMS, result, is_quick=True)
    assert set(verdicts.values()) == {verdict.INCONCLUSIVE, verdict.INFORMATION}


def test_a_failed_request_leaves_no_conclusion() -> None:
    result = make_result(1.005)
    result.rounds = [
        *result.rounds,
        {"on": {**result.rounds[0]["on"], "errors": 1}, "off": result.rounds[0]["off"]},
    ]
    assert read_verdicts(STREAMS, result)["tokens/s lost"] == verdict.INCONCLUSIVE


def test_the_note_has_the_share_without_stops_beside_it() -> None:
    result = make_result(1.0, ours=80)
    result.running_samples = {**result.samples, "total": 20_000, "ours": 100}
    note = lines.make_lines(STREAMS, result, False)[-1].note
    assert note.startswith("80 of 10,000 samples; 0.50 % of 20,000 without stops")


def test_both_blocks_of_a_state_count_together() -> None:
    first = Block(1.0, 0.2, np.array([0.1, 0.2]), np.array([1.0]), np.array([2.0]), 3, 0)
    second = Block(3.0, 0.4, np.array([0.3]), np.array([]), np.array([]), 1, 1)
    figures = measurement.summarize_block(first.join(second))
    assert figures["rate"] == 1.0
    assert figures["cpu"] == pytest.approx(0.15)
    assert (figures["gap_p50"], figures["first_p99"], figures["errors"]) == (0.2, 1.0, 1.0)


def test_a_block_begins_when_requests_from_before_the_switch_have_ended() -> None:
    warm = Block(1.0, 0.1, np.array([]), np.array([]), np.linspace(0, 4, 101), 0, 0)
    assert measurement.choose_settle_time(warm) == pytest.approx(3.8)


def test_a_result_is_continued_only_with_the_same_source(tmp_path: Path) -> None:
    path = tmp_path / "whole" / "s.json"
    make_result(1.0).save(path)
    assert len(measurement.load_result(path, "x").rounds) == 20
    assert measurement.load_result(path, "y") == ServerResult("y")
    assert measurement.load_result(tmp_path / "absent.json", "x") == ServerResult("x")
