"""What finished requests used: tokens, prompt tokens that a cache had, tokens that were guessed ahead."""

from __future__ import annotations

from collections.abc import Mapping

from otel_infer import semconv
from otel_infer.records import RequestRecord
from otel_infer.sinks.histograms import Key
from otel_infer.sinks.numbers import Numbers


def count(numbers: Mapping[str, Numbers], record: RequestRecord, who: Key, caller: Key) -> None:
    """Adds it to the counters in `numbers`, whatever came of the request; nothing to those that it has nothing of."""
    tokens = numbers[semconv.TOKENS.name]
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
        numbers[semconv.DRAFTED.name].add(who, record.drafted_tokens)
        numbers[semconv.ACCEPTED.name].add(who, record.accepted_tokens)
