"""The loop benchmarks use only undisturbed steps, in which no other process emptied the caches."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks import blocks, verdict
from benchmarks.blocks import Block, Rounds, compute_overhead

STEPS, ROUNDS = 20, 30
QUIET, DISTURBED = 2_000, 40_000


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are alike, or the bounds do not matter."""
    monkeypatch.setattr(verdict, "RESAMPLES", 20)


def make_block(step: float, more: float = 0.0, disturbed: int = 0) -> Block:
    """Returns steps of `step` ns. The first `disturbed` steps take `more` ns, and have slow probes."""
    times = np.full(STEPS, step)
    times[:disturbed] += more
    probe = np.full(STEPS, QUIET)
    probe[:disturbed] = DISTURBED
    return Block(times, times, probe)


def make_rounds(bare: Block, hooked: Block, count: int = ROUNDS) -> Rounds:
    return Rounds([bare] * count, [hooked] * count, [bare] * count)


def build_lines(measured: Rounds, wanted: int = ROUNDS) -> dict[str, verdict.Line]:
    stock = make_rounds(make_block(1e6), make_block(2e6))
    return {
        line.claim.removeprefix("loop: "): line for line in blocks.make_lines("loop", measured, wanted, stock)
    }


def test_half_a_percent_passes_and_two_percent_fail() -> None:
    cheap, expensive = (
        build_lines(make_rounds(make_block(1e6), make_block(1e6 * more))) for more in (1.005, 1.02)
    )
    assert cheap["p50, CPU time"].verdict == verdict.PASS
    assert cheap["p50, CPU time"].value == pytest.approx(0.5)
    assert cheap["less than the stock SDK, CPU time"].value == pytest.approx(200)
    assert expensive["p50, CPU time"].verdict == verdict.FAIL


@pytest.mark.parametrize("skew", [1, -1])
@pytest.mark.parametrize("more", [1.0, 1.02])
def test_a_varying_pace_of_blocks_is_no_cost(skew: int, more: float) -> None:
    rng = np.random.default_rng(1)

    def build_blocks(factor: float) -> list[Block]:
        paces = 1e6 * np.exp(skew * rng.exponential(0.1, 4000))
        return [make_block(pace * factor) for pace in paces]

    p50, p50_control, p99, p99_control = compute_overhead(
        Rounds(build_blocks(1), build_blocks(more), build_blocks(1)), "wall"
    )
    assert p50.value == pytest.approx(more - 1, abs=0.005)
    assert p99.value == pytest.approx(more - 1, abs=0.05)
    assert abs(p50_control.value) < 0.005 and abs(p99_control.value) < 0.05


def test_disturbed_steps_are_excluded_from_the_overhead() -> None:
    by_claim = build_lines(make_rounds(make_block(1e6), make_block(1e6, more=1e5, disturbed=4)))
    assert (by_claim["p99, CPU time"].value, by_claim["p99, CPU time"].verdict) == (0, verdict.PASS)
    assert re.findall(r"\d+%", by_claim["p99, CPU time"].control) == ["100%", "80%"]


def test_more_slow_probes_with_hooks_are_inconclusive() -> None:
    by_claim = build_lines(make_rounds(make_block(1e6), make_block(1e6, more=1e5, disturbed=8)))
    assert by_claim["p50, CPU time"].verdict == verdict.INCONCLUSIVE


def test_a_slow_step_with_a_fast_probe_counts() -> None:
    slow = make_block(1e6)
    slow.wall[:2] += 1e5  # both columns are one array
    assert build_lines(make_rounds(make_block(1e6), slow))["p99, CPU time"].verdict == verdict.FAIL


def test_too_few_undisturbed_rounds_are_inconclusive() -> None:
    disturbed = make_block(1e6, disturbed=STEPS - blocks.MIN_UNDISTURBED + 1)
    measured = Rounds(*([*kind, make_block(1e6)] for kind in make_rounds(disturbed, disturbed)))
    line = build_lines(measured)["p50, CPU time"]
    assert (line.verdict, line.value) == (verdict.INCONCLUSIVE, 0)


def test_rounds_continue_until_enough_steps_are_undisturbed() -> None:
    """At most `MAX_TIMES_ROUNDS` times the wanted rounds are measured."""

    class Hooks:
        def switch_on(self) -> None: ...

        def switch_off(self) -> None: ...

    assert len(blocks.run_alternating(lambda: make_block(1e6), Hooks(), 5).bare) == 5
    assert len(blocks.run_alternating(lambda: make_block(1e6, disturbed=STEPS // 2), Hooks(), 5).bare) == 8
    noisy = iter(range(10_000))
    measured = blocks.run_alternating(
        lambda: make_block(1e6, disturbed=STEPS * (next(noisy) % 2)), Hooks(), 5
    )
    assert len(measured.bare) == 5 * blocks.MAX_TIMES_ROUNDS


def test_each_step_is_timed_with_its_probe() -> None:
    completed: list[int] = []
    measured = blocks.run_steps(lambda: completed.append(1), 7)
    assert len(completed) == 7
    assert [len(column) for column in measured] == [7, 7, 7]
    assert (measured.probe > 0).all()
