"""Finds ordinary requests, whose spans and metrics differ from those of others only in ids and times. Pure.

An ordinary request succeeded, was in no engine's steps, and its stages follow each other. Requests with the same
`ShapedRequest.key` have the same stages and attributes. Any other request is no `ShapedRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.assembly.requests.stages import RESULT_STAGES
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple

MAX_ITEMS = 127
"""Items of a stage that one byte of a varint holds."""
MAX_PAUSES = 16
"""A request with more pauses is no ordinary one."""
_NO_PARENT = bytes(8)
_NOT_RECORDED = frozenset(
    (
        semconv.SPAN_ACCEPT,
        *semconv.WAIT_STAGES,
        semconv.SPAN_INGRESS,
        semconv.SPAN_POSTPROCESS,
        semconv.SPAN_PREFILL,
        semconv.SPAN_DECODE,
    )
)
"""Stages that follow from other events, and waits. A request that records one of them itself is not ordinary."""


class ShapedRequest(NamedTuple):
    """An ordinary request that is over. `key`: all that is not an id, a time, or the number of items of a stage.

    `starts`, `ends`: of its stages, in order of time; `lengths`: ns. `numbers`: for each stage, the numbers among
    its attributes.
    """

    key: tuple[Any, ...]
    request: OpenRequest
    begin: int
    end: int
    starts: Sequence[int]
    ends: Sequence[int]
    lengths: Sequence[int]
    numbers: Sequence[tuple[float, ...]]


def find_shape(request: OpenRequest) -> ShapedRequest | None:
    """Returns an ordinary request that is over, with its times; None for any other."""
    arrived, ended = request.arrived, request.ended
    if ended is None or _was_in_engine(request) or _has_more_to_export(request):
        return None
    if ended.outcome or ended.error_type or ended.detokenize_ns or ended.chunks > MAX_ITEMS:
        return None
    begin, end, attributes = arrived.at, ended.at, request.attributes
    stages = _follow_stages(request, ended, begin, end)
    if stages is None or not (arrived.flags & events.SAMPLED and arrived.wall_at > 0):
        return None
    names, starts, ends, numbers = stages
    has_parent = arrived.parent_span_id != _NO_PARENT
    key = (
        arrived[6:], has_parent, ended.status_code, ended.chunks, request.unseen,
        (*attributes, *attributes.values()), tuple(names), tuple(map(len, numbers)),
    )  # fmt: skip
    lengths = [until - since for since, until in zip(starts, ends)]
    fields = key, request, begin, end, starts, ends, lengths, numbers
    return make_tuple(ShapedRequest, fields)  # type: ignore[no-any-return]


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
        or request.fragments
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
        or request.links
        or request.span_name
        or request.tracestate
        or request.preempted
        or request.prefixes
        or request.drafts
        or request.cache
        or request.accepted_since
    )


_Stages = tuple[list[str], list[int], list[int], list[tuple[float, ...]]]


def _follow_stages(request: OpenRequest, ended: events.RequestEnded, begin: int, end: int) -> _Stages | None:
    """Returns names, starts, ends and numbers of all stages; None where they do not follow each other.

    They are those of `build_stages`: `ingress` up to the first recorded one, and `postprocess` from the response on.
    """
    names: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    numbers: list[tuple[float, ...]] = []
    if begin >= end:
        return None
    flags, operation, _, _, name = request.arrived[6:]
    is_http = flags & events.OWN_SERVER_SPAN or ended.status_code or (name and not operation)
    free_from = begin
    for stage in request.stages:
        if type(stage) is not events.StageEnded:
            return None
        ended_at, started_at, name, items = stage
        if not names:
            started_at = max(started_at, begin)
            if started_at > begin and is_http:
                names, starts, ends, numbers = [semconv.SPAN_INGRESS], [begin], [started_at], [()]
        ended_at = min(ended_at, end)
        if not free_from <= started_at < ended_at or items > MAX_ITEMS or name in _NOT_RECORDED:
            return None
        names.append(name)
        starts.append(started_at)
        ends.append(ended_at)
        numbers.append((items,) if items > 0 else ())
        free_from = ended_at
    response_at = request.response_started_at
    if names and response_at:
        if not free_from <= response_at < end:
            return None
        has_result = not RESULT_STAGES.isdisjoint(names)
        if (
            has_result and names[-1] not in RESULT_STAGES
        ):  # postprocessing contains the stages after the result
            return None
        names.append(semconv.SPAN_POSTPROCESS)
        starts.append(free_from if has_result else response_at)
        ends.append(end)
        numbers.append((ended.send_wait_ns / 1e9,))
    return names, starts, ends, numbers
