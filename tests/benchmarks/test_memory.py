"""When memory that grows fails, and when nothing can be said."""

from __future__ import annotations

import pytest

from benchmarks.memory import Series, lines_of, verdict_of
from benchmarks.slope import Slope
from benchmarks.verdict import FAIL, INCONCLUSIVE, PASS, Control
from otel_infer import semconv

WARM, COLD = Control("", True), Control("", False)
NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Slope(0.2, -3, 4), PASS),
        (Slope(0, 0, 0), PASS),
        (Slope(2, -3, 9), INCONCLUSIVE),
        (Slope(0.2, 0.1, 0.3), FAIL),
        (Slope(-5, -9, -1), INCONCLUSIVE),
        (Slope(NAN, NAN, NAN), INCONCLUSIVE),
    ],
    ids=["around zero", "nothing at all", "too noisy", "slow but sure", "still falling", "too short"],
)
def test_growth_that_is_sure_fails_however_slow(found: Slope, verdict: str) -> None:
    assert verdict_of(found, WARM) == verdict


def test_nothing_is_said_before_everything_is_warm() -> None:
    assert verdict_of(Slope(0, 0, 0), COLD) == INCONCLUSIVE


def series(grows: float, slower_after: int = 100) -> Series:
    """Samples every 8 s, from some sample on every 12; the server stays as it is."""
    made = Series()
    for number in range(100):
        at = number * 8.0 + max(number - slower_after, 0) * 4.0
        made.note(at, number * 10_000, int(1e8 + grows * number), 30_000_000)
    return made


def counted(requests: int, **lost: float) -> dict[str, dict[str, float]]:
    return {semconv.REQUEST_DURATION.name: {"": requests}, semconv.SELF_LOST.name: lost}


def test_a_sidecar_that_holds_a_few_bytes_of_every_request_fails() -> None:
    lost, sidecar, per_million, server, _ = lines_of(series(10_000 * 10), 1000, counted(1000), 0)
    assert (lost.verdict, sidecar.verdict, server.verdict) == (PASS, FAIL, PASS)
    assert (sidecar.value, per_million.value) == (pytest.approx(45), pytest.approx(10))


@pytest.mark.parametrize(("leaks", "verdict"), [(0, PASS), (5_000, FAIL)])
def test_what_is_held_is_what_is_left_when_the_free_pages_are_gone(leaks: int, verdict: str) -> None:
    """They are given back every 48 s; until then there are more of them each time."""
    made = Series()
    for number in range(1000):
        at = number * 2.0
        free = (number % 24) * (100_000 + 200 * number)
        made.read(at, 60_000_000 + leaks * number + free, 30_000_000)
        if number % 10 == 9:
            made.note(at, (number + 1) * 1000, *made.floor())
    _, sidecar, *_ = lines_of(made, 1000, counted(1000), 0)
    assert sidecar.verdict == verdict
    assert f"at most {made.most[0] / 1e6:.1f} MB" in sidecar.note


def test_a_run_that_lost_requests_says_nothing_of_memory() -> None:
    lost, sidecar, *_ = lines_of(series(0), 1000, counted(999, events_overwritten=3), 0)
    assert (lost.verdict, lost.value, sidecar.verdict) == (FAIL, 4, INCONCLUSIVE)


def test_a_few_pages_more_are_not_told_from_none() -> None:
    _, pages, *_ = lines_of(series(4096 / 10), 1000, counted(1000), 0)
    _, leak, *_ = lines_of(series(4096), 1000, counted(1000), 0)
    assert (pages.verdict, leak.verdict) == (PASS, FAIL)


def test_memory_that_follows_the_rate_says_nothing() -> None:
    _, sidecar, *_ = lines_of(series(1000, slower_after=70), 1000, counted(1000), 0)
    assert (sidecar.verdict, sidecar.control) == (INCONCLUSIVE, "after 240 s, rate -29.9 %")


def test_a_run_as_long_as_its_warm_up_says_nothing() -> None:
    short = Series()
    for number in range(60):
        short.note(number * 4.5, number, 100_000_000, 30_000_000)
    _, sidecar, *_ = lines_of(short, 1000, counted(1000), 0)
    assert (sidecar.verdict, sidecar.control) == (INCONCLUSIVE, "too short: 240 s are warm-up")


def test_steps_that_were_not_to_be_exported_are_no_loss() -> None:
    lost, *_ = lines_of(series(0), 1000, counted(1000, steps_over_budget=5000), 0)
    assert lost.verdict == PASS
