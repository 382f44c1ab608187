"""What was decided of finished requests: which objectives they missed, and where the time of the slow ones went."""

from __future__ import annotations

from collections.abc import Mapping

from otel_infer import facts, semconv
from otel_infer.keeper import Decision, was_stopped
from otel_infer.records import Blame, RequestRecord
from otel_infer.sinks.histograms import Key
from otel_infer.sinks.numbers import Numbers


def count_missed(numbers: Mapping[str, Numbers], record: RequestRecord, decision: Decision, who: Key) -> None:
    """A request that failed has kept no promise; one that its client had stopped was promised nothing any more from then on, and
    says nothing where it had no token by then."""
    stopped = was_stopped(record)
    if stopped and not (decision.missed or record.first_token_at):
        return
    missed = ",".join(decision.missed) or semconv.MISSED_NONE
    said = missed if stopped or record.outcome == facts.OK else semconv.MISSED_ERROR
    numbers[semconv.REQUEST_OBJECTIVES.name].add((said, *who), 1)


def count_slow(numbers: Mapping[str, Numbers], blame: Blame, who: Key) -> None:
    """The causes of one slow request."""
    spent = numbers[semconv.BLAME_SLOW_DURATION.name]
    for cause, length in blame.causes.items():
        spent.add((cause, *who), length / 1e9)
