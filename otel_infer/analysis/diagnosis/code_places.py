"""Names the code in which the time of a cause passes, from samples of late threads. Pure.

A sample of an event loop stands for the pause in which it was taken, as does one that was taken while garbage was collected.
Any other sample stands for the time since which its thread was late. Only the requests with most of the cause count, and the period in which the cause can occur. A share is a
part of the sampled time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.analysis.diagnosis.slow_requests import SLOW_SHARE, sum_cause_time
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer.events import CodeLocated
from otel_infer.semconv import causes
from otel_infer.semconv.causes import Cause

MIN_SHARE = 0.2
"""Share of the sampled time from which a place is named."""
MAX_PLACES = 2
_MAIN_SHARE = 0.5
"""Share of the sampled time from which one kind of code is more than all other."""
_MODEL_LIBRARIES = ("/torch/", "/transformers/")
TIME_OF = {
    semconv.CAUSE_LOCK_QUEUE: (
        semconv.CAUSE_LOCK_QUEUE,
        semconv.CAUSE_APPLICATION,
        semconv.CAUSE_INGRESS,
    )
}
"""A lock that is written in C cannot be hooked: until it is had, it is the application's time, or before any stage."""


class CodePlace(NamedTuple):
    """A function in which threads were late. `share`: of the sampled time; `samples`: how many found it.

    `line`: the line that was sampled most. `callee` and `waiter` are those of the longest sample.
    """

    function: str
    file: str
    line: int
    share: float
    samples: int
    callee: str
    waiter: str

    @property
    def is_model_code(self) -> bool:
        """Whether the function runs a model."""
        return any(library in self.file + self.callee for library in _MODEL_LIBRARIES)


def find_code_places(
    records: Sequence[RequestRecord], cause: str, *, is_widened: bool = False
) -> list[CodePlace]:
    """Returns the functions in which the time of a cause passed, in the requests that have most of it.

    `is_widened`: where those have no sample, in the requests that have at least half as much of it.
    """
    row = causes.CAUSES.get(cause)
    if row is None or not row.sampled:
        return []
    lengths = [sum_cause_time(record, *TIME_OF.get(cause, (cause,))) for record in records]
    order = sorted(range(len(records)), key=lambda position: -lengths[position])
    count = max(round(len(records) * SLOW_SHARE), 3)
    weights = _weigh_samples([records[position] for position in order[:count]], row)
    if is_widened and not weights:
        least = max(lengths[order[:count][-1]] / 2, 1) if order else 1
        weights = _weigh_samples(
            [record for record, length in zip(records, lengths, strict=True) if length >= least], row
        )
    return _rank_places(weights)


def _rank_places(weights: dict[CodeLocated, int]) -> list[CodePlace]:
    """Returns the functions with the largest shares of the sampled time."""
    by_function: dict[tuple[str, str], list[tuple[int, CodeLocated]]] = defaultdict(list)
    for sample, weight in weights.items():
        by_function[sample.file, sample.function].append((weight, sample))
    whole = sum(weights.values()) or 1
    places = [_make_place(found, whole) for found in by_function.values()]
    places.sort(key=lambda place: (-place.share, place.file, place.line))
    return [place for place in places if place.share >= MIN_SHARE][:MAX_PLACES]


def is_blocked_by_code(records: Sequence[RequestRecord]) -> bool:
    """Returns whether most of the sampled time that model calls wait is in code that is no model's: it holds the GIL or a lock."""
    places = find_code_places(records, semconv.CAUSE_BLOCKED)
    return sum(place.share for place in places if not place.is_model_code) > _MAIN_SHARE


def describe_code(records: Sequence[RequestRecord], cause: str) -> list[str]:
    """Returns a sentence for each place of a cause."""
    return [
        f"{place.share:.0%} of {cause} is {describe_place(place)} ({place.samples} {'sample' if place.samples == 1 else 'samples'})"
        for place in find_code_places(records, cause, is_widened=True)
    ]


def describe_place(place: CodePlace | CodeLocated) -> str:
    """Returns a place as text, with the code that it called or that waits for it."""
    text = f"`{place.function}` at {PurePosixPath(place.file).name}:{place.line}"
    if place.callee:
        text += f", in {_shorten(place.callee)}"
    if place.waiter:
        text += f", which {_shorten(place.waiter)} waits for"
    return text


def _weigh_samples(records: Iterable[RequestRecord], cause: Cause) -> dict[CodeLocated, int]:
    """Returns the time that each sample stands for, ns. Several requests may have the same sample."""
    weights: dict[CodeLocated, int] = defaultdict(int)
    for record in records:
        begin, end = _find_period(record, cause.group)
        for sample in record.code_samples:
            if cause.pause == causes.STOPS_PROCESS:
                since, until = _find_pause(record, sample, cause.name)
            else:
                since, until = _measure_delay(record, sample)
            length = min(until, end) - max(since, begin)
            if sample.reason in cause.sampled and length > 0:
                weights[sample] = max(weights[sample], length)
    return weights


def _find_period(record: RequestRecord, group: str) -> tuple[int, int]:
    """Returns the period of a request in which causes of this group occur."""
    begin, end = record.arrived_at, record.ended_at
    if group == causes.GROUP_POST_ENGINE:
        return record.last_token_at or begin, end
    if group in (causes.GROUP_PRE_ENGINE, causes.GROUP_QUEUE):
        return begin, record.first_token_at or end
    return begin, end


def _measure_delay(record: RequestRecord, sample: CodeLocated) -> tuple[int, int]:
    """Returns from when until when the thread was late: of an event loop, the whole pause."""
    if sample.reason == semconv.LATE_EVENT_LOOP:
        for pause in record.loop_pauses:
            if pause.started_at <= sample.at and pause.ended_at >= sample.since:
                return pause.started_at, pause.ended_at
    return sample.since, sample.at


def _find_pause(record: RequestRecord, sample: CodeLocated, cause: str) -> tuple[int, int]:
    """Returns the pause of the process in which a sample was taken; an empty period if it was in none of this cause."""
    for pause in record.pauses:
        if pause.cause == cause and pause.started_at <= sample.at <= pause.ended_at:
            return pause.started_at, pause.ended_at
    return sample.at, sample.at


def _make_place(found: list[tuple[int, CodeLocated]], whole: int) -> CodePlace:
    lines: dict[int, int] = defaultdict(int)
    for weight, sample in found:
        lines[sample.line] += weight
    _, longest = max(found)
    return CodePlace(
        longest.function, longest.file, max(lines, key=lambda line: lines[line]),
        sum(weight for weight, _ in found) / whole, len(found), longest.callee, longest.waiter,
    )  # fmt: skip


def _shorten(described: str) -> str:
    """Returns a described frame with the last parts of its path."""
    function, _, place = described.partition(" ")
    return f"`{function}` ({'/'.join(PurePosixPath(place).parts[-2:])})"
