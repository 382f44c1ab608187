"""The part `whole` of `gpu_verify`: its plan fits a command, its gates are for upper bounds, and it runs on a CPU too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_server, gpu_verify, verdict
from benchmarks.gpu_server import ServedModel, StreamLoad, TimePlan
from benchmarks.verdict import Line
from benchmarks.whole import servers
from benchmarks.whole.measurement import ServerResult, order_states
from benchmarks.whole.switched_server import OFF, ON, UNMARKED

COMMAND_S = 600
THREE = (ON, UNMARKED, OFF)
SERVED = gpu_server.BILLION.serve_streams(32)


def test_the_plan_fits_a_command_and_gives_each_load_two_minutes() -> None:
    start_s, warm_up_s, model_s, stop_s = 50.0, 12.0, 40.0, 20.0
    passed, plan = start_s, gpu_server.PLAN
    for left in range(len(gpu_server.LOADS), 0, -1):
        passed += warm_up_s
        seconds = plan.share_time(passed, left)
        assert 115 <= seconds <= 150
        passed += seconds
    assert model_s + passed + stop_s < COMMAND_S - 30


def test_a_slow_start_shortens_all_loads_alike() -> None:
    plan = TimePlan(1, 1, 1, load_s=100, all_s=200)
    assert plan.share_time(0, 2) == 100
    assert plan.share_time(50, 3) == 50
    assert plan.share_time(201, 1) == 0


def test_a_round_that_would_end_late_is_not_begun() -> None:
    result = ServerResult("")
    assert gpu_server.has_time(result, 0.1)
    assert not gpu_server.has_time(result, 0)
    result.rounds, result.rounds_s = [{}, {}], 20.0
    assert gpu_server.has_time(result, 30)
    assert not gpu_server.has_time(result, 29)


def test_each_state_is_the_first_in_turn_and_both_halves_mirror() -> None:
    assert order_states((ON, OFF), 0) == [ON, OFF, OFF, ON]
    assert order_states((ON, OFF), 1) == [OFF, ON, ON, OFF]
    assert {order_states(THREE, number)[0] for number in range(3)} == set(THREE)
    assert order_states(THREE, 1) == [UNMARKED, OFF, ON, ON, OFF, UNMARKED]


def make_result(lost: list[float], marked: float = 100.0, errors: float = 0.0) -> ServerResult:
    """Returns rounds that lost these shares."""
    off = dict.fromkeys(("rate", "cpu", "gap_p50", "gap_p99", "first_p99"), 1.0) | {"errors": errors}
    rounds = []
    for share in lost:
        on = {name: 1 - share if name == "rate" else 1 + share for name in off} | {"errors": 0.0}
        rounds.append({ON: on | {"marked": marked}, UNMARKED: on, OFF: off})
    return ServerResult("", rounds=rounds)


def read_verdicts(result: ServerResult, states: tuple[str, ...] = (ON, OFF)) -> dict[str, str]:
    rows = gpu_server.make_lines(SERVED, result, states)
    return {row.claim.removeprefix("transformers serve on a GPU, 32 streams, "): row.verdict for row in rows}


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([0.005] * 10, verdict.PASS),
        ([-0.02, 0.006] * 8, verdict.PASS),
        ([0.005, 0.012] * 5, verdict.INCONCLUSIVE),
        ([0.02] * 10, verdict.FAIL),
        ([0.005], verdict.INCONCLUSIVE),
    ],
)
def test_a_gate_passes_by_its_upper_bound(lost: list[float], expected: str) -> None:
    verdicts = read_verdicts(make_result(lost))
    assert verdicts["hooks and marks: tokens/s lost"] == expected
    assert verdicts["hooks and marks: gap between tokens, p50"] == expected
    assert verdicts["hooks and marks: gap between tokens, p99"] == expected
    assert verdicts["hooks and marks: time to the first token, p99"] == verdict.INFORMATION


def test_hooks_without_marks_are_for_information() -> None:
    verdicts = read_verdicts(make_result([0.02] * 10), THREE)
    alone = {judged for claim, judged in verdicts.items() if claim.startswith("hooks without marks")}
    assert (len(verdicts), alone) == (10, {verdict.INFORMATION})


@pytest.mark.parametrize("damage", [{"marked": 0.0}, {"errors": 1.0}])
def test_without_marks_or_with_failed_requests_nothing_is_concluded(damage: dict[str, float]) -> None:
    verdicts = read_verdicts(make_result([0.005] * 10, **damage))
    assert set(verdicts.values()) == {verdict.INCONCLUSIVE, verdict.INFORMATION}


class FakeServer:
    """A server that obeys, with these counts."""

    def __init__(self, marked_steps: int, captured_graphs: int) -> None:
        self.marked_steps, self.captured_graphs = marked_steps, captured_graphs
        self.acknowledged: list[object] = []
        self.states: list[str] = []

    def set_hooks(self, state: str) -> None:
        self.states.append(state)

    def read_log(self) -> str:
        return "its log"


@pytest.mark.parametrize("counts", [(0, 5), (5, 0)])
def test_a_gpu_without_marks_or_graphs_ends_the_measurement(counts: tuple[int, int]) -> None:
    server: Any = FakeServer(*counts)
    with pytest.raises(RuntimeError, match="its log"):
        gpu_server.check_setup(server, is_on_gpu=True)
    gpu_server.check_setup(server, is_on_gpu=False)
    assert server.states == [OFF, UNMARKED, ON] * 2


def test_the_server_has_cuda_graphs_on_the_gpu() -> None:
    command = " ".join(SERVED.command)
    assert "--continuous-batching" in command
    assert "--cb-use-cuda-graph" in command
    assert "--device cuda" in command


def test_without_a_gpu_the_parts_are_named_as_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, skipped in (
        ([], "calls, clocks, accuracy, overhead, safety"),
        (["--only", "whole"], "whole"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_verify", *arguments])
        assert gpu_verify.main() == 2
        assert capsys.readouterr().err == f"no CUDA device; skipped: {skipped}\n"


@pytest.mark.slow
def test_a_server_on_a_cpu_is_measured_in_each_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    saved: list[list[Line]] = []
    rows = gpu_server.measure(
        tmp_path,
        saved.append,
        ServedModel(1, 128, servers.ON_CPU, 16, is_on_gpu=False),
        (StreamLoad(1, (ON, OFF)), StreamLoad(2, THREE)),
        TimePlan(0.5, 0.5, 0.5, load_s=8.0, all_s=60.0),
    )
    assert [row.claim for row in saved[-1]] == [row.claim for row in rows]
    assert len(rows) == 15
    assert {row.control for row in rows} == {"0 steps marked"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "transformers-serve-1.json",
        "transformers-serve-2.json",
    ]
