"""Finds the interferers of a request: whose prompts were in its steps, and for how long each. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from otel_infer.assembly.engine.types import PrefillInStep
from otel_infer.assembly.records.request import Interferer, RequestRecord
from otel_infer.config import tenancy

MAX_NAMED_PER_STEP = 16
"""Requests with prompt tokens in one step that may be named as interferers."""


class StepPrefills:
    """The requests with prompt tokens in one step.

    The `MAX_NAMED_PER_STEP` largest are named. Smaller ones count for their traffic class only.
    """

    def __init__(self, prefills: Sequence[PrefillInStep]) -> None:
        by_size = sorted(prefills, key=lambda prefill: -prefill.tokens)
        named, rest = by_size[:MAX_NAMED_PER_STEP], by_size[MAX_NAMED_PER_STEP:]
        self.named_prefills = [
            ((prefill.trace_id, prefill.span_id), prefill.tokens, prefill.traffic_class)
            for prefill in named
            if prefill.tokens
        ]
        self.tokens = {prefill.span_id: prefill.tokens for prefill in by_size}
        self.total_tokens = sum(self.tokens.values())
        self.rest_by_class: dict[str, int] = defaultdict(int)
        self._rest_classes = {prefill.span_id: prefill.traffic_class for prefill in rest}
        for prefill in rest:
            self.rest_by_class[prefill.traffic_class] += prefill.tokens

    def count_other_tokens(self, span_id: bytes) -> tuple[int, dict[str, int]]:
        """Returns the prompt tokens of all other requests, and those of unnamed requests by traffic class."""
        own = self.tokens.get(span_id, 0)
        own_class = self._rest_classes.get(span_id)
        return self.total_tokens - own, self.rest_by_class if own_class is None else {
            **self.rest_by_class,
            own_class: self.rest_by_class[own_class] - own,
        }


def find_interferers(
    record: RequestRecord,
    steps: Sequence[tuple[int, int]],
    step_prefills: dict[tuple[int, int], StepPrefills],
) -> list[Interferer]:
    """Returns the interferers of a request and their share of each step's interference, by prompt tokens.

    `steps`: (step, ns of interference). `step_prefills`: a cache, shared by the records of one call.
    """
    if record.prefills_by_step is None:
        return []
    lengths: dict[tuple[bytes, bytes], int] = defaultdict(int)
    classes: dict[tuple[bytes, bytes], str] = {}
    for step, length in sorted(steps):  # the latest step has the most complete class of an interferer
        prefills = step_prefills.get((id(record.prefills_by_step), step))
        if prefills is None:
            prefills = step_prefills[id(record.prefills_by_step), step] = StepPrefills(
                record.prefills_by_step.get(step, ())
            )
        tokens, rest = prefills.count_other_tokens(record.span_id)
        for ids, own_tokens, traffic_class in prefills.named_prefills:
            if ids[1] != record.span_id:
                lengths[ids] += length * own_tokens // tokens
                classes[ids] = traffic_class
        for traffic_class, class_tokens in rest.items():
            if class_tokens:
                lengths[b"", traffic_class.encode()] += length * class_tokens // tokens
                classes[b"", traffic_class.encode()] = traffic_class
    return [Interferer(*ids, length, classes[ids]) for ids, length in lengths.items() if length]


def find_worst_interferer(
    record: RequestRecord, interferers: Sequence[Interferer], interference: int
) -> Interferer | None:
    """Returns the request that interfered most, if it has a name.

    None where the interference is below a fiftieth of the request's duration.
    """
    if interference * 50 < record.duration_ns or not interferers:
        return None
    worst = max(interferers, key=lambda interferer: interferer.length if interferer.trace_id else 0)
    return worst._replace(length=min(worst.length, interference)) if worst.trace_id else None


def split_interference_by_class(
    interferers: Sequence[Interferer], interference: int
) -> tuple[tuple[str, int], ...]:
    """Returns the interference in ns by traffic class, in proportion to the known interferers.

    The values sum to `interference`. The rounding error goes to the largest class.
    """
    lengths: dict[str, int] = defaultdict(int)
    for interferer in interferers:
        lengths[interferer.traffic_class] += interferer.length
    if not lengths:
        return ((tenancy.UNKNOWN, interference),)
    whole = sum(lengths.values())
    parts = {traffic_class: interference * length // whole for traffic_class, length in lengths.items()}
    parts[max(lengths, key=lambda traffic_class: lengths[traffic_class])] += interference - sum(
        parts.values()
    )
    return tuple((traffic_class, length) for traffic_class, length in parts.items() if length)
