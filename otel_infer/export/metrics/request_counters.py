"""Counts the tokens, objectives and causes of finished requests.

Tokens include cached prompt tokens and draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.missed_objectives import is_client_cancelled
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.counters import NumberSeries
from otel_infer.export.metrics.histograms import Histogram, Key
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events


class RequestSeries(NamedTuple):
    """The series that count requests of one shape: of the HTTP request, of the request, and of its stages.

    `batch_sizes`: None where the request waited in no queue of the application. `causes`: key of the times of causes; None
    where they are not counted. `version`: of the aggregator.
    """

    histograms: Sequence[Histogram]
    batch_sizes: Histogram | None
    causes: Key | None
    version: tuple[int, int]


def count_usage(
    numbers: Mapping[str, NumberSeries], record: RequestRecord, request_key: Key, caller_key: Key
) -> None:
    """Adds the usage of a request to `numbers`, whatever its outcome.

    Counters without usage get no series.
    """
    tokens = numbers[semconv.REQUEST_TOKENS.name]
    for token_type, count in (
        (semconv.TOKEN_INPUT, record.input_tokens),
        (semconv.TOKEN_OUTPUT, record.output_tokens),
    ):
        if count:
            tokens.add((token_type, *request_key, *caller_key), count)
    if record.prefix_tokens:
        numbers[semconv.KV_PREFIX_QUERIES.name].add(request_key, record.prefix_tokens)
        numbers[semconv.KV_PREFIX_HITS.name].add(request_key, record.cached_tokens)
    if record.drafted_tokens:
        numbers[semconv.DRAFTED_TOKENS.name].add(request_key, record.drafted_tokens)
        numbers[semconv.ACCEPTED_TOKENS.name].add(request_key, record.accepted_tokens)


def find_batch_size(record: RequestRecord) -> int:
    """Returns the items of the model call that served a request; 0 if it waited in no queue of the application."""
    call = record.find_stage(semconv.SPAN_FORWARD)
    if call is None or record.find_stage(semconv.SPAN_QUEUE_WAIT) is None:
        return 0
    items = call.attributes.get(semconv.ITEMS, 1)
    return items if isinstance(items, int) else 1


def count_objectives(
    numbers: Mapping[str, NumberSeries], record: RequestRecord, decision: Decision, key: Key
) -> None:
    """Counts a request by its missed objectives.

    A failed request counts as `error`. A request that its client cancelled is not counted, if it had neither
    a token nor missed an objective.
    """
    stopped = is_client_cancelled(record)
    if stopped and not (decision.missed or record.first_token_at):
        return
    missed = ",".join(decision.missed) or semconv.SLO_MISSED_NONE
    result = missed if stopped or record.outcome == events.OK else semconv.SLO_MISSED_ERROR
    numbers[semconv.REQUEST_OBJECTIVES.name].add((result, *key), 1)


def count_slow_causes(numbers: Mapping[str, NumberSeries], causes: Mapping[str, int], key: Key) -> None:
    """Adds the causes of one slow request, ns."""
    seconds = numbers[semconv.LATENCY_SLOW_DURATION.name]
    for cause, length in causes.items():
        seconds.add((cause, *key), length / 1e9)
