"""Verdicts for growing memory: when it fails, and when the run is inconclusive."""

from __future__ import annotations

import pytest

from benchmarks.memory import Series, judge_growth, make_lines
from benchmarks.slope import Slope
from benchmarks.verdict import FAIL, INCONCLUSIVE, PASS, Control
from otel_infer import semconv

WARM, COLD = Control("", True), Control("", False)
NAN = float("nan")


@pytest.mark.parametrize(
    ("slope", "verdict"),
    [
        (Slope(0.2, -3, 4), PASS),
        (Slope(0, 0, 0), PASS),
        (Slope(2, -3, 9), INCONCLUSIVE),
        (Slope(0.2, 0.1, 0.3), FAIL),
        (Slope(-5, -9, -1), INCONCLUSIVE),
        (Slope(NAN, NAN, NAN), INCONCLUSIVE),
    ],
    ids=["around zero", "constant", "noisy", "slow growth", "falling", "too short"],
)
def test_significant_growth_fails_at_any_rate(slope: Slope, verdict: str) -> None:
    assert judge_growth(slope, WARM) == verdict


def test_a_cold_process_is_inconclusive() -> None:
    assert judge_growth(Slope(0, 0, 0), COLD) == INCONCLUSIVE


def make_series(grows: float, slower_after: int = 100) -> Series:
    """Returns samples every 8 s, and every 12 s from sample `slower_after` on. The server's memory is constant."""
    samples = Series()
    for number in range(100):
        at = number * 8.0 + max(number - slower_after, 0) * 4.0
        samples.add_sample(at, number * 10_000, int(1e8 + grows * number), 30_000_000)
    return samples


def make_metrics(requests: int, **lost: float) -> dict[str, dict[str, float]]:
    return {semconv.REQUEST_DURATION.name: {"": requests}, semconv.SELF_LOST.name: lost}


def test_a_sidecar_leak_per_request_fails() -> None:
    lost, sidecar, server = make_lines(make_series(10_000 * 10), 1000, make_metrics(1000), 0)
    assert (lost.verdict, sidecar.verdict, server.verdict) == (PASS, FAIL, PASS)
    assert sidecar.value == pytest.approx(45)


@pytest.mark.parametrize(("leaks", "verdict"), [(0, PASS), (5_000, FAIL)])
def test_free_pages_are_not_held_memory(leaks: int, verdict: str) -> None:
    """The allocator returns free pages every 48 s, and their number grows from one return to the next."""
    samples = Series()
    for number in range(1000):
        at = number * 2.0
        free = (number % 24) * (100_000 + 200 * number)
        samples.add_reading(at, 60_000_000 + leaks * number + free, 30_000_000)
        if number % 10 == 9:
            samples.add_sample(at, (number + 1) * 1000, *samples.find_minimum())
    _, sidecar, *_ = make_lines(samples, 1000, make_metrics(1000), 0)
    assert sidecar.verdict == verdict
    assert f"{samples.peaks[0] / 1e6:.1f} MB" in sidecar.note


def test_a_run_with_lost_requests_is_inconclusive() -> None:
    lost, sidecar, *_ = make_lines(make_series(0), 1000, make_metrics(999, events_overwritten=3), 0)
    assert (lost.verdict, lost.value, sidecar.verdict) == (FAIL, 4, INCONCLUSIVE)


def test_growth_by_a_few_pages_passes() -> None:
    _, pages, *_ = make_lines(make_series(4096 / 10), 1000, make_metrics(1000), 0)
    _, leak, *_ = make_lines(make_series(4096), 1000, make_metrics(1000), 0)
    assert (pages.verdict, leak.verdict) == (PASS, FAIL)


def test_a_varying_request_rate_is_inconclusive() -> None:
    _, sidecar, *_ = make_lines(make_series(1000, slower_after=70), 1000, make_metrics(1000), 0)
    assert sidecar.verdict == INCONCLUSIVE
    assert "240 s" in sidecar.control
    assert "-29.9 %" in sidecar.control


def test_a_run_within_its_warm_up_is_inconclusive() -> None:
    short = Series()
    for number in range(60):
        short.add_sample(number * 4.5, number, 100_000_000, 30_000_000)
    _, sidecar, *_ = make_lines(short, 1000, make_metrics(1000), 0)
    assert sidecar.verdict == INCONCLUSIVE
    assert "too short" in sidecar.control
    assert "240 s" in sidecar.control


def test_steps_over_budget_are_no_loss() -> None:
    lost, *_ = make_lines(make_series(0), 1000, make_metrics(1000, steps_over_budget=5000), 0)
    assert lost.verdict == PASS
