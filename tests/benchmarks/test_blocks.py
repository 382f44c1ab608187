"""What the loops' benchmarks conclude: about the steps in which nobody else emptied the caches, and only about those."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import blocks, verdict
from benchmarks.blocks import Block, Rounds, overhead

STEPS, ROUNDS = 20, 30
QUIET, DISTURBED = 2_000, 40_000


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are alike here, or there are so many that nobody looks at the bounds."""
    monkeypatch.setattr(verdict, "RESAMPLES", 20)


def block(step: float, more: float = 0.0, disturbed: int = 0) -> Block:
    """Steps of so many ns; the first `disturbed` of them take `more`, and the probe after them says so."""
    times = np.full(STEPS, step)
    times[:disturbed] += more
    probe = np.full(STEPS, QUIET)
    probe[:disturbed] = DISTURBED
    return Block(times, times, probe)


def rounds(bare: Block, hooked: Block, count: int = ROUNDS) -> Rounds:
    return Rounds([bare] * count, [hooked] * count, [bare] * count)


def lines(found: Rounds, wanted: int = ROUNDS) -> dict[str, verdict.Line]:
    stock = rounds(block(1e6), block(2e6))
    return {one.claim.removeprefix("loop: "): one for one in blocks.lines_of("loop", found, wanted, stock)}


def test_a_hook_that_costs_half_a_percent_passes_and_one_that_costs_two_fails() -> None:
    cheap, dear = (lines(rounds(block(1e6), block(1e6 * more))) for more in (1.005, 1.02))
    assert cheap["p50, CPU time"].verdict == verdict.PASS
    assert cheap["p50, CPU time"].value == pytest.approx(0.5)
    assert cheap["less than the stock SDK, CPU time"].value == pytest.approx(200)
    assert dear["p50, CPU time"].verdict == verdict.FAIL


@pytest.mark.parametrize("skew", [1, -1])
@pytest.mark.parametrize("more", [1.0, 1.02])
def test_a_pace_that_changes_from_block_to_block_is_nobodys_cost(skew: int, more: float) -> None:
    chance = np.random.default_rng(1)

    def restless(factor: float) -> list[Block]:
        paces = 1e6 * np.exp(skew * chance.exponential(0.1, 4000))
        return [block(pace * factor) for pace in paces]

    p50, p50_control, p99, p99_control = overhead(Rounds(restless(1), restless(more), restless(1)), "wall")
    assert p50.value == pytest.approx(more - 1, abs=0.005)
    assert p99.value == pytest.approx(more - 1, abs=0.05)
    assert abs(p50_control.value) < 0.005 and abs(p99_control.value) < 0.05


def test_what_others_did_to_some_steps_is_not_said_of_the_hooks() -> None:
    found = lines(rounds(block(1e6), block(1e6, more=1e5, disturbed=4)))
    assert (found["p99, CPU time"].value, found["p99, CPU time"].verdict) == (0, verdict.PASS)
    assert "100% of the steps undisturbed, hooked 80%" in found["p99, CPU time"].control


def test_a_hook_after_which_the_probe_is_slow_more_often_is_not_excused() -> None:
    found = lines(rounds(block(1e6), block(1e6, more=1e5, disturbed=8)))
    assert found["p50, CPU time"].verdict == verdict.INCONCLUSIVE


def test_a_slow_step_whose_probe_was_quick_counts() -> None:
    slow = block(1e6)
    slow.wall[:2] += 1e5  # both columns are one array
    assert lines(rounds(block(1e6), slow))["p99, CPU time"].verdict == verdict.FAIL


def test_too_few_undisturbed_rounds_say_nothing_and_the_figure_is_that_of_all() -> None:
    restless = block(1e6, disturbed=STEPS - blocks.LEAST + 1)
    found = rounds(restless, restless)
    found = Rounds(*([*kind, block(1e6)] for kind in found))
    line = lines(found)["p50, CPU time"]
    assert (line.verdict, line.value) == (verdict.INCONCLUSIVE, 0)


def test_rounds_go_on_until_enough_of_their_steps_were_undisturbed_and_no_longer_than_patience() -> None:
    class Hooks:
        def put_on(self) -> None: ...

        def take_off(self) -> None: ...

    assert len(blocks.alternating(lambda: block(1e6), Hooks(), 5).bare) == 5
    assert len(blocks.alternating(lambda: block(1e6, disturbed=STEPS // 2), Hooks(), 5).bare) == 8
    noisy = iter(range(10_000))
    found = blocks.alternating(lambda: block(1e6, disturbed=STEPS * (next(noisy) % 2)), Hooks(), 5)
    assert len(found.bare) == 5 * blocks.PATIENCE


def test_steps_are_timed_one_by_one_each_with_its_probe() -> None:
    done: list[int] = []
    found = blocks.run_steps(lambda: done.append(1), 7)
    assert len(done) == 7
    assert [len(column) for column in found] == [7, 7, 7]
    assert (found.probe > 0).all()
