"""Finds ordinary requests, whose spans and metrics differ from those of others only in ids, times and numbers. Pure.

An ordinary request succeeded, was in no engine's steps, and its stages follow each other. Requests with the same
`ShapedRequest.key` have the same stages, the same number of links and the same attributes but for numbers. Any other request
is no `ShapedRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.assembly.requests.stages import RESULT_STAGES
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple

MAX_NUMBER = (1 << 14) - 1
"""Items of a stage, or requests of a batch, that two bytes of a varint hold."""
MAX_PAUSES, MAX_LINKS = 16, 16
"""A request with more pauses or links is no ordinary one."""
_NO_PARENT = bytes(8)
_ONE_BYTE = 127
"""The largest number that one byte of a varint holds."""
_NOT_RECORDED = frozenset(
    (
        *semconv.WAIT_STAGES,
        semconv.SPAN_INGRESS,
        semconv.SPAN_POSTPROCESS,
        semconv.SPAN_PREFILL,
        semconv.SPAN_DECODE,
    )
)
"""Stages that follow from other events, and waits. A request that records one of them itself is not ordinary."""


class ShapedRequest(NamedTuple):
    """An ordinary request that is over. `key`: all that is not an id, a time, or a number.

    `starts`, `ends`: of its stages, in order of time; `lengths`: ns. `numbers`: for each stage, the numbers among
    its attributes. `batch`: the requests of its batch; 0 = it was in none.
    """

    key: tuple[Any, ...]
    request: OpenRequest
    begin: int
    end: int
    starts: Sequence[int]
    ends: Sequence[int]
    lengths: Sequence[int]
    numbers: Sequence[tuple[float, ...]]
    batch: int


_Stages = list[tuple[str, int, int, tuple[float, ...]]]
"""Name, start, end and numbers of each stage, in order of time."""


def find_shape(request: OpenRequest) -> ShapedRequest | None:
    """Returns an ordinary request that is over, with its times; None for any other."""
    arrived, ended = request.arrived, request.ended
    if ended is None or _was_in_engine(request) or _has_more_to_export(request):
        return None
    if ended.outcome or ended.error_type or ended.detokenize_ns or ended.chunks > _ONE_BYTE:
        return None
    stages = _follow_stages(request, ended)
    batch = request.attributes.get(semconv.BATCH_REQUESTS, 0)
    if stages is None or not (isinstance(batch, int) and 0 <= batch <= MAX_NUMBER):
        return None
    if not (arrived.flags & events.SAMPLED and arrived.wall_at > 0):
        return None
    names, starts, ends, numbers = zip(*stages) if stages else ((),) * 4
    fields = (
        _make_key(request, ended, names, numbers, batch), request, request.arrived_at, ended.at, starts, ends,
        [until - since for since, until in zip(starts, ends)], numbers, batch,
    )  # fmt: skip
    return make_tuple(ShapedRequest, fields)  # type: ignore[no-any-return]


def _make_key(
    request: OpenRequest,
    ended: events.RequestEnded,
    names: Sequence[str],
    numbers: Sequence[tuple[float, ...]],
    batch: int,
) -> tuple[Any, ...]:
    """Returns all that requests of one shape have in common. Of a number that is its width as a varint.

    `names`, `numbers`: of the stages.
    """
    attributes = request.attributes
    values = [*attributes.values()]
    if batch:
        values[[*attributes].index(semconv.BATCH_REQUESTS)] = batch > _ONE_BYTE
    widths = [each and each[0] > _ONE_BYTE for each in numbers]
    return (
        request.arrived[6:], request.arrived.parent_span_id != _NO_PARENT, ended.status_code, ended.chunks,
        request.unseen, len(request.links), (*attributes, *values), (*names, *widths),
    )  # fmt: skip


def _was_in_engine(request: OpenRequest) -> bool:
    return bool(
        request.submitted
        or request.known_from
        or request.scheduled_at
        or request.chunks
        or request.finished
        or request.token_reached_at
        or request.first_sent_at
        or request.received_at
        or request.timed_stages
    )


def _has_more_to_export(request: OpenRequest) -> bool:
    return bool(
        len(request.pauses) > MAX_PAUSES
        or request.marks
        or request.code_samples
        or request.start_ids
        or request.telemetry_lost
        or request.events
        or len(request.links) > MAX_LINKS
        or any(link.attributes for link in request.links)
        or request.span_name
        or request.tracestate
        or request.preempted
        or request.prefixes
        or request.drafts
        or request.cache
    )


def _follow_stages(request: OpenRequest, ended: events.RequestEnded) -> _Stages | None:
    """Returns all stages; None where they do not follow each other.

    They are those of `build_stages`: `ingress` up to the first one that the server recorded, and `postprocess` from the
    response on.
    """
    begin, seen_at, end = request.arrived_at, request.arrived.at, ended.at
    if begin >= end:
        return None
    flags, operation, _, _, name = request.arrived[6:]
    has_ingress = bool(flags & events.OWN_SERVER_SPAN or ended.status_code or (name and not operation))
    free_from, has_followed = begin, False
    stages: _Stages = []
    for stage in request.stages:
        if type(stage) is not events.StageEnded:
            return None
        ended_at, started_at, name, items = stage
        started_at, ended_at = max(started_at, begin), min(ended_at, end)
        if not has_followed and started_at >= seen_at and name != semconv.SPAN_ACCEPT:
            has_followed = True
            if has_ingress and started_at > seen_at:
                if seen_at < free_from:
                    return None
                stages.append((semconv.SPAN_INGRESS, seen_at, started_at, ()))
        if not free_from <= started_at < ended_at or items > MAX_NUMBER or name in _NOT_RECORDED:
            return None
        stages.append((name, started_at, ended_at, (items,) if items > 0 else ()))
        free_from = ended_at
    if has_followed and request.response_started_at:
        return _add_postprocess(stages, request.response_started_at, ended, free_from)
    return stages


def _add_postprocess(
    stages: _Stages, response_at: int, ended: events.RequestEnded, free_from: int
) -> _Stages | None:
    """Adds `postprocess`; returns None where other stages are in it."""
    has_result = any(name in RESULT_STAGES for name, *_ in stages)
    if not free_from <= response_at < ended.at or (has_result and stages[-1][0] not in RESULT_STAGES):
        return None  # postprocessing contains the stages after the result
    since = free_from if has_result else response_at
    stages.append((semconv.SPAN_POSTPROCESS, since, ended.at, (ended.send_wait_ns / 1e9,)))
    return stages
