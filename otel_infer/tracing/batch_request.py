"""The requests of one batch, recorded as one: each event and each stage is recorded for every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple
from otel_infer.tracing.request_span import RequestSpan

MAX_LINKS = 16
"""Requests of a batch that the first one is linked to."""


class BatchRequest(RequestSpan):
    """The requests of a batch. `members`: in the order in which their items were taken; they close themselves."""

    def __init__(self, members: Sequence[RequestSpan]) -> None:
        self.members = tuple(members)
        self._span_ids, self.around, self.owner = members[0]._span_ids, members[0].around, "batch"
        self.handle, self.arrived_at, self.has_server = members[0].handle, members[0].arrived_at, False
        self.provider_spans = None
        self.operation, self.is_named = members[0].operation, all(member.is_named for member in members)

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Whether all requests of the batch have ended."""
        for member in self.members:  # noqa: SIM110  a generator is one more call for each
            if not member.ended:
                return False
        return True

    @property
    def _alive(self) -> list[RequestSpan]:
        return [member for member in self.members if not member.ended]

    @property
    def packed(self) -> bytes:
        return b"".join([member.packed for member in self.members])

    def record_event(self, event: Any) -> None:
        for member in self._alive:
            member.record_event(event)

    def record_stage(self, name: str, started_at: int, items: int = 0) -> None:
        self.record_stage_at(_clock.now(), name, started_at, items)

    def record_stage_at(self, at: int, name: str, started_at: int, items: int) -> None:
        for member in self._alive:
            member.record_stage_at(at, name, started_at, items)

    def record_token_reached(self) -> None:
        for member in self._alive:
            member.record_token_reached()

    def record_submitted(
        self, engine: str, sequences: int = 1, input_tokens: int = 0, max_tokens: int = 0
    ) -> None:
        count = len(self.members)
        for member in self._alive:
            member.record_submitted(engine, max(sequences // count, 1), input_tokens // count, max_tokens)

    def set_operation(self, operation: str = "", provider: str = "", model: str = "") -> None:
        names = operation, provider, model
        for member in self._alive:
            if not (member.is_named or member.has_forward_name):
                if not member.record_names(names):
                    member.set_operation(*names)
                member.is_named = True

    def set_engine_error(self, error_type: str) -> None:
        for member in self._alive:
            member.set_engine_error(error_type)

    def link_members(self) -> None:
        """Links the first request to the others, and each of them to the first. Each states how many they are.

        Links are recorded as by `add_link`, which makes contexts of the API first.
        """
        at, (first, *others), limit = _clock.now(), self.members, self._limits.links
        formed = make_tuple(events.BatchFormed, (at, len(self.members)))
        to_first = make_tuple(events.SpanLinked, (at, *first.ids[:2]))
        first.record_event(formed)
        for number, other in enumerate(others):
            other.record_event(formed)
            if other._link_count < limit:
                other._link_count += 1
                other.record_event(to_first)
            if number < MAX_LINKS and first._link_count < limit:
                first._link_count += 1
                first.record_event(make_tuple(events.SpanLinked, (at, *other.ids[:2])))


def combine_requests(requests: Sequence[RequestSpan]) -> RequestSpan:
    """Returns the only request, or several as a batch."""
    return BatchRequest(requests) if len(requests) > 1 else requests[0]


def attach_members(requests: Sequence[RequestSpan]) -> Any:
    """Makes a request current, or several as a batch whose members are linked; returns the token for `detach`, or None."""
    if not requests:
        return None
    request = combine_requests(requests)
    if isinstance(request, BatchRequest):
        request.link_members()
    return request.attach()
