"""Every span that was offered has arrived, or is counted as lost."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.slow_collector import account
from benchmarks.verdict import FAIL, PASS
from otel_infer import semconv


def verdicts(spans: int, unique: int, requests: int = 10, starts: int = 0, **lost: float) -> list[str]:
    """Of 100 step spans, 10 requests, 30 stages and so many spans of a server start."""
    metrics = {
        semconv.REQUEST_DURATION.name: {"chat": requests},
        semconv.STAGE_DURATION.name: {"queue,host": 10, "prefill,host": 10, "decode,host": 10, "detokenize,host": 10},
        semconv.STARTUP_DURATION.name: {"total": starts},
        semconv.SELF_LOST.name: lost,
    }  # fmt: skip
    return [one.verdict for one in account("", 100, 10, Counter(spans=spans, unique=unique), metrics)]


@pytest.mark.parametrize(
    "lost", [{}, {"queue_full": 15}, {"queue_full": 5, "refused": 7, "steps_over_budget": 90}]
)
def test_what_arrived_and_what_was_lost_is_what_was_offered(lost: dict[str, float]) -> None:
    arrived = 140 - int(sum(lost.values()))
    assert verdicts(arrived, arrived, **lost) == [PASS, PASS]


def test_one_span_that_is_not_accounted_for_fails() -> None:
    assert verdicts(139, 139) == [FAIL, PASS]
    assert verdicts(140, 140, queue_full=1) == [FAIL, PASS]


def test_the_start_of_the_server_is_offered_too() -> None:
    assert verdicts(141, 141, starts=1) == [PASS, PASS]
    assert verdicts(140, 140, starts=1) == [FAIL, PASS]


def test_a_span_that_came_twice_fails() -> None:
    assert verdicts(141, 140) == [FAIL, PASS]


def test_a_request_that_was_not_counted_fails() -> None:
    assert verdicts(140, 140, requests=9) == [FAIL, PASS]


def test_facts_that_were_overwritten_are_a_loss_of_their_own() -> None:
    assert verdicts(140, 140, events_overwritten=3) == [PASS, FAIL]
