"""What finished requests used: tokens, prompt tokens that a cache had, tokens that were guessed ahead."""

from __future__ import annotations

from collections.abc import Mapping

from otel_infer import semconv
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord
from otel_infer.export.metrics.counters import NumberSeries
from otel_infer.export.metrics.histograms import Key
from otel_infer.export.sampling.tail_sampler import Decision, is_client_cancelled
from otel_infer.ringbuffer import events


def count_usage(numbers: Mapping[str, NumberSeries], record: RequestRecord, who: Key, caller: Key) -> None:
    """Adds it to the counters in `numbers`, whatever came of the request; nothing to those that it has nothing of."""
    tokens = numbers[semconv.REQUEST_TOKENS.name]
    for of, used in (
        (semconv.TOKEN_INPUT, record.input_tokens),
        (semconv.TOKEN_OUTPUT, record.output_tokens),
    ):
        if used:
            tokens.add((of, *who, *caller), used)
    if record.prefix_tokens:
        numbers[semconv.KV_PREFIX_QUERIES.name].add(who, record.prefix_tokens)
        numbers[semconv.KV_PREFIX_HITS.name].add(who, record.cached_tokens)
    if record.drafted_tokens:
        numbers[semconv.DRAFTED_TOKENS.name].add(who, record.drafted_tokens)
        numbers[semconv.ACCEPTED_TOKENS.name].add(who, record.accepted_tokens)


def count_objectives(
    numbers: Mapping[str, NumberSeries], record: RequestRecord, decision: Decision, who: Key
) -> None:
    """A request that failed has kept no promise; one that its client had stopped was promised nothing any more from then on, and
    says nothing where it had no token by then."""
    stopped = is_client_cancelled(record)
    if stopped and not (decision.missed or record.first_token_at):
        return
    missed = ",".join(decision.missed) or semconv.SLO_MISSED_NONE
    said = missed if stopped or record.outcome == events.OK else semconv.SLO_MISSED_ERROR
    numbers[semconv.REQUEST_OBJECTIVES.name].add((said, *who), 1)


def count_slow_causes(numbers: Mapping[str, NumberSeries], blame: LatencyBreakdown, who: Key) -> None:
    """The causes of one slow request."""
    spent = numbers[semconv.LATENCY_SLOW_DURATION.name]
    for cause, length in blame.causes.items():
        spent.add((cause, *who), length / 1e9)
