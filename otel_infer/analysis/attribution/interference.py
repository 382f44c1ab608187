"""Who held up a request: whose prompts were in its steps, and for how long each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from otel_infer.assembly.engine.types import Prefiller
from otel_infer.assembly.records.request import Offender, RequestRecord
from otel_infer.config import tenancy

MOST_NAMED = 16
"""Requests with prompts in one step of which each may be named as the offender."""


class Crowd:
    """Whose prompts were in one step. Of many, those with few tokens only count for their class."""

    def __init__(self, prefillers: Sequence[Prefiller]) -> None:
        known = sorted(prefillers, key=lambda who: -who.tokens)
        named, rest = known[:MOST_NAMED], known[MOST_NAMED:]
        self.first = [((who.trace_id, who.span_id), who.tokens, who.named) for who in named if who.tokens]
        self.tokens = {who.span_id: who.tokens for who in known}
        self.all = sum(self.tokens.values())
        self.rest: dict[str, int] = defaultdict(int)
        self._of_rest = {who.span_id: who.named for who in rest}
        for who in rest:
            self.rest[who.named] += who.tokens

    def beside(self, span_id: bytes) -> tuple[int, dict[str, int]]:
        """Tokens of all but this request; those by class that nobody is named for."""
        own = self.tokens.get(span_id, 0)
        named = self._of_rest.get(span_id)
        return self.all - own, self.rest if named is None else {**self.rest, named: self.rest[named] - own}


def named_by(
    record: RequestRecord, steps: Sequence[tuple[int, int]], crowds: dict[tuple[int, int], Crowd]
) -> list[Offender]:
    """Whose prompts were in the steps that took it longer, so many ns each: by tokens, for how long each."""
    if record.prefillers is None:
        return []
    lengths: dict[tuple[bytes, bytes], int] = defaultdict(int)
    named: dict[tuple[bytes, bytes], str] = {}
    for step, length in sorted(steps):  # what is known of an offender last is most
        crowd = crowds.get((id(record.prefillers), step))
        if crowd is None:
            crowd = crowds[id(record.prefillers), step] = Crowd(record.prefillers.get(step, ()))
        tokens, rest = crowd.beside(record.span_id)
        for who, of_who, class_ in crowd.first:
            if who[1] != record.span_id:
                lengths[who] += length * of_who // tokens
                named[who] = class_
        for class_, of_class in rest.items():
            if of_class:
                lengths[b"", class_.encode()] += length * of_class // tokens
                named[b"", class_.encode()] = class_
    return [Offender(*who, length, named[who]) for who, length in lengths.items() if length]


def worst(record: RequestRecord, offenders: Sequence[Offender], interference: int) -> Offender | None:
    """Who interfered most; nobody is named for what is below a fiftieth of the request."""
    if interference * 50 < record.duration_ns or not offenders:
        return None
    most = max(offenders, key=lambda offender: offender.length if offender.trace_id else 0)
    return most._replace(length=min(most.length, interference)) if most.trace_id else None


def by_class(offenders: Sequence[Offender], interference: int) -> tuple[tuple[str, int], ...]:
    """The interference, divided as those who are known have caused it; in whole ns, the rest is of the largest."""
    lengths: dict[str, int] = defaultdict(int)
    for offender in offenders:
        lengths[offender.named] += offender.length
    if not lengths:
        return ((tenancy.UNKNOWN, interference),)
    whole = sum(lengths.values())
    parts = {named: interference * length // whole for named, length in lengths.items()}
    parts[max(lengths, key=lambda named: lengths[named])] += interference - sum(parts.values())
    return tuple((named, length) for named, length in parts.items() if length)
