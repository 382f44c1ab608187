"""Who held up a request: whose prompts were in its steps, and for how long each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from otel_infer.assembly.engine.types import PrefillInStep
from otel_infer.assembly.records.request import Interferer, RequestRecord
from otel_infer.config import tenancy

MAX_NAMED_PER_STEP = 16
"""Requests with prompts in one step of which each may be named as the offender."""


class StepPrefills:
    """Whose prompts were in one step. Of many, those with few tokens only count for their class."""

    def __init__(self, prefillers: Sequence[PrefillInStep]) -> None:
        known = sorted(prefillers, key=lambda who: -who.tokens)
        named, rest = known[:MAX_NAMED_PER_STEP], known[MAX_NAMED_PER_STEP:]
        self.named_prefills = [
            ((who.trace_id, who.span_id), who.tokens, who.traffic_class) for who in named if who.tokens
        ]
        self.tokens = {who.span_id: who.tokens for who in known}
        self.total_tokens = sum(self.tokens.values())
        self.rest_by_class: dict[str, int] = defaultdict(int)
        self._rest_classes = {who.span_id: who.traffic_class for who in rest}
        for who in rest:
            self.rest_by_class[who.traffic_class] += who.tokens

    def count_other_tokens(self, span_id: bytes) -> tuple[int, dict[str, int]]:
        """Tokens of all but this request; those by class that nobody is named for."""
        own = self.tokens.get(span_id, 0)
        named = self._rest_classes.get(span_id)
        return self.total_tokens - own, self.rest_by_class if named is None else {
            **self.rest_by_class,
            named: self.rest_by_class[named] - own,
        }


def interferers(
    record: RequestRecord, steps: Sequence[tuple[int, int]], crowds: dict[tuple[int, int], StepPrefills]
) -> list[Interferer]:
    """Whose prompts were in the steps that took it longer, so many ns each: by tokens, for how long each."""
    if record.prefills_by_step is None:
        return []
    lengths: dict[tuple[bytes, bytes], int] = defaultdict(int)
    named: dict[tuple[bytes, bytes], str] = {}
    for step, length in sorted(steps):  # what is known of an offender last is most
        crowd = crowds.get((id(record.prefills_by_step), step))
        if crowd is None:
            crowd = crowds[id(record.prefills_by_step), step] = StepPrefills(
                record.prefills_by_step.get(step, ())
            )
        tokens, rest = crowd.count_other_tokens(record.span_id)
        for who, of_who, class_ in crowd.named_prefills:
            if who[1] != record.span_id:
                lengths[who] += length * of_who // tokens
                named[who] = class_
        for class_, of_class in rest.items():
            if of_class:
                lengths[b"", class_.encode()] += length * of_class // tokens
                named[b"", class_.encode()] = class_
    return [Interferer(*who, length, named[who]) for who, length in lengths.items() if length]


def worst_interferer(
    record: RequestRecord, offenders: Sequence[Interferer], interference: int
) -> Interferer | None:
    """Who interfered most; nobody is named for what is below a fiftieth of the request."""
    if interference * 50 < record.duration_ns or not offenders:
        return None
    most = max(offenders, key=lambda offender: offender.length if offender.trace_id else 0)
    return most._replace(length=min(most.length, interference)) if most.trace_id else None


def interference_by_class(offenders: Sequence[Interferer], interference: int) -> tuple[tuple[str, int], ...]:
    """The interference, divided as those who are known have caused it; in whole ns, the rest is of the largest."""
    lengths: dict[str, int] = defaultdict(int)
    for offender in offenders:
        lengths[offender.traffic_class] += offender.length
    if not lengths:
        return ((tenancy.UNKNOWN, interference),)
    whole = sum(lengths.values())
    parts = {named: interference * length // whole for named, length in lengths.items()}
    parts[max(lengths, key=lambda named: lengths[named])] += interference - sum(parts.values())
    return tuple((named, length) for named, length in parts.items() if length)
