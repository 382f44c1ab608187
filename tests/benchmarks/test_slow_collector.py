"""Every offered span has arrived or is counted as lost."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.slow_collector import account_spans
from benchmarks.verdict import FAIL, PASS
from otel_infer import semconv


def list_verdicts(spans: int, unique: int, requests: int = 10, starts: int = 0, **lost: float) -> list[str]:
    """Returns the verdicts for 100 step spans, 10 requests, 30 stages and `starts` spans of a server start."""
    metrics = {
        semconv.REQUEST_DURATION.name: {"chat": requests},
        semconv.STAGE_DURATION.name: {"queue,host": 10, "prefill,host": 10, "decode,host": 10, "detokenize,host": 10},
        semconv.STARTUP_DURATION.name: {"total": starts},
        semconv.SELF_LOST.name: lost,
    }  # fmt: skip
    return [line.verdict for line in account_spans("", 100, 10, Counter(spans=spans, unique=unique), metrics)]


@pytest.mark.parametrize(
    "lost", [{}, {"queue_full": 15}, {"queue_full": 5, "refused": 7, "steps_over_budget": 90}]
)
def test_arrived_and_lost_spans_add_up_to_offered(lost: dict[str, float]) -> None:
    arrived = 140 - int(sum(lost.values()))
    assert list_verdicts(arrived, arrived, **lost) == [PASS, PASS]


def test_an_unaccounted_span_fails() -> None:
    assert list_verdicts(139, 139) == [FAIL, PASS]
    assert list_verdicts(140, 140, queue_full=1) == [FAIL, PASS]


def test_spans_of_the_server_start_are_offered() -> None:
    assert list_verdicts(141, 141, starts=1) == [PASS, PASS]
    assert list_verdicts(140, 140, starts=1) == [FAIL, PASS]


def test_a_duplicate_span_fails() -> None:
    assert list_verdicts(141, 140) == [FAIL, PASS]


def test_an_uncounted_request_fails() -> None:
    assert list_verdicts(140, 140, requests=9) == [FAIL, PASS]


def test_overwritten_events_are_a_separate_loss() -> None:
    assert list_verdicts(140, 140, events_overwritten=3) == [PASS, FAIL]
