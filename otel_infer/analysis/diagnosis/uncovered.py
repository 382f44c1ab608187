"""Locates the time of requests that no measurement covers: between which stages, or inside which. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord


def locate_uncovered_time(records: Iterable[RequestRecord]) -> str:
    """Returns where most of the uncovered time of these requests lies; empty without any."""
    lengths: Counter[str] = Counter()
    for record in records:
        _add_gaps(lengths, record)
        if record.breakdown is not None:
            lengths["inside `decode`"] += record.breakdown.streaming.get(semconv.CAUSE_UNEXPLAINED, 0)
    ((place, length),) = lengths.most_common(1) or [("", 0)]
    return place if length > 0 else ""


def _add_gaps(lengths: Counter[str], record: RequestRecord) -> None:
    """Adds the lengths of the gaps between the stages of one request, by the stages around them."""
    last, covered_until = "", record.arrived_at
    for stage in sorted(record.stages, key=lambda stage: stage.started_at):
        if stage.started_at > covered_until:
            place = f"between `{last}` and `{stage.name}`" if last else f"before `{stage.name}`"
            lengths[place] += stage.started_at - covered_until
        if stage.ended_at >= covered_until:
            last, covered_until = stage.name, stage.ended_at
    if record.ended_at > covered_until:
        lengths[f"after `{last}`" if last else "in the whole request"] += record.ended_at - covered_until
