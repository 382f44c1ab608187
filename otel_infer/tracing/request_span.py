"""The request span: live while the request is, a child of its caller and the parent of whatever the request starts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext
from opentelemetry.util import types

from otel_infer import _clock, semconv
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context
from otel_infer.tracing.context import detach as detach
from otel_infer.tracing.pending_spans import PendingProviderSpans, end_spans
from otel_infer.tracing.span_ids import LazySpanIds, Limits, SpanFactory, SpanIds

_REQUEST_KEY = otel_context.create_key("otel_infer-request")
_EMPTY_CONTEXT = Context()


class RequestSpan(trace.Span):
    """A request in flight: a live span for everybody else, and for integrations the place where its facts are stated.

    All `*_at` are monotonic ns; 0 = not yet.
    """

    # What most requests never change costs none of them a store.
    ended = is_named = tokenizing = False
    responding = tokens_reached = first_token_sent = False
    operation = engine = ""
    detokenize_ns = 0
    _attribute_keys: set[str] | None = None
    _event_count = _link_count = 0
    _has_error_status = _is_context_read = False
    _engine_error = _request_id = _response_id = ""
    _operation_names = ("", "", "")
    _context: SpanContext | None = None

    def __init__(
        self, opened: SpanIds | LazySpanIds, handle: int, arrived_at: int, owner: str, around: Context
    ) -> None:
        """`around`: what `attach` starts from; the caller's baggage lies in it.

        `tokenizing`: an engine does, and says so itself. `has_server`: the SERVER span above it is ours. `has_news`: the next piece of the response may be the first, or the
        first with a token.
        """
        self._span_ids, self.around = opened, around
        self.provider_spans = opened.provider_spans
        self.handle, self.arrived_at, self.owner = handle, arrived_at, owner
        self.has_server = opened.has_server
        self.chunks = self.send_wait_ns = 0
        self.inspect_next_chunk = True

    @property
    def server(self) -> SpanContext | None:
        """Of the SERVER span above it, where that is ours."""
        return self._span_ids.server

    @property
    def _limits(self) -> Limits:
        return span_factory.limits if span_factory is not None else Limits()

    @property
    def packed(self) -> bytes:
        """The handle as it stands in a step's columns."""
        return self.handle.to_bytes(4, "little")

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def record_event(self, fact: Any) -> None:
        """States a fact about this request."""
        recorder.record(self.handle, fact)

    def record_stage(self, name: str, started_at: int, items: int = 0) -> None:
        """A stage of this name is over."""
        recorder.record(self.handle, events.StageEnded(_clock.now(), started_at, name, items))

    def record_submitted(
        self, engine: str, sequences: int = 1, input_tokens: int = 0, max_tokens: int = 0
    ) -> None:
        """Handed over to the engine."""
        self.engine = engine
        said = events.clamp_count(sequences), events.clamp_count(input_tokens), events.clamp_count(max_tokens)
        recorder.record(self.handle, events.RequestSubmitted(_clock.now(), *said, engine))

    def set_operation(self, operation: str = "", provider: str = "", model: str = "") -> None:
        """What became known after arrival: operation, provider (engine), served model. Said once: a thousand inputs of one request
        would fill the ring."""
        name = operation, provider, model
        if name != self._operation_names:
            self._operation_names = name
            self._record_attributes(
                *zip((semconv.OPERATION_NAME, semconv.PROVIDER_NAME, semconv.REQUEST_MODEL), name)
            )

    def set_request_id(self, request_id: str) -> None:
        """How the engine calls it. Said once, as the name."""
        if request_id != self._request_id:
            self._request_id = request_id
            self.record_attribute(semconv.REQUEST_ID, request_id)

    def set_response_id(self, response_id: str) -> None:
        """How its client calls the answer (`chatcmpl-…`). Said once, as the name."""
        if response_id != self._response_id:
            self._response_id = response_id
            self.record_attribute(semconv.RESPONSE_ID, response_id)

    def set_caller(self, tenant: str, traffic_class: str) -> None:
        """Who asks, and whether somebody waits for it."""
        self._record_attributes((semconv.TENANT, tenant), (semconv.TRAFFIC_CLASS, traffic_class))

    def _record_attributes(self, *said: tuple[str, str]) -> None:
        for key, value in said:
            if value:
                self.record_attribute(key, value)

    def record_attribute(self, key: str, value: events.Value) -> None:
        """An attribute of ours on the request span, outside the limits of user code."""
        recorder.record(self.handle, events.AttributeSet(_clock.now(), key, value))

    def set_engine_error(self, error_type: str) -> None:
        """The engine failed it; whoever closes it will say so. Empty: a later attempt did not fail."""
        self._engine_error = error_type and (self._engine_error or error_type)

    def record_token_reached(self) -> None:
        """A token reached the side of the server that talks to the reader."""
        if not self.tokens_reached:
            self.tokens_reached = self.inspect_next_chunk = True
            recorder.record(self.handle, events.TokenReached(_clock.now()))

    def close(
        self,
        outcome: int = events.OK,
        error_type: str = "",
        status_code: int = 0,
        at: int = 0,
        http: int = 0,
        route: str = "",
    ) -> None:
        """The request is over; the second call does nothing. `http`, `route`: as in `facts.ExchangeEnded`."""
        if self.ended:
            return
        self.ended = True
        self.around = _EMPTY_CONTEXT  # in it may be the request before, which a connection's reader has kept
        if self.provider_spans is not None:  # where a provider records, user code says it to that one's span
            self.set_status(getattr(self.provider_spans[1], "status", None))
        if self._engine_error and outcome != events.ABORTED:  # what was made of it says less
            outcome, error_type = events.ERROR, self._engine_error
        elif self._has_error_status and outcome == events.OK:
            outcome, error_type = events.ERROR, semconv.OTHER
        at = at or _clock.now()
        said = at, outcome, error_type, status_code, self.chunks, self.send_wait_ns, self.detokenize_ns
        if (
            not (self.has_server or self._is_context_read or self.engine or self.provider_spans)
            and self._span_ids.parent
        ):
            self._use_parent_context()
        if http:
            recorder.close_request(self.handle, tuple.__new__(events.ExchangeEnded, (*said, route, http)))
        else:
            recorder.close_request(self.handle, tuple.__new__(events.RequestEnded, said))
        if not self.handle and self.provider_spans is not None:  # nobody will hear of it
            end_spans(self.provider_spans)

    def _use_parent_context(self) -> None:
        """Whoever asks from now on, in a task that outlives the request, is told of the span above."""
        own, self._context = self._context, self._span_ids.parent or self._context
        if self._is_context_read:  # another thread has asked just now
            self._context = own
        else:
            self.record_event(events.SpanUnseen(_clock.now()))

    def __deepcopy__(self, memo: Any) -> RequestSpan:
        """Engines copy their own objects, which may carry this one: it stays one request."""
        return self

    # ── the API's span ───────────────────────────────────────────────────────────────────────────────────────────

    def get_span_context(self) -> SpanContext:
        self._is_context_read = True
        if self.ended and (known := thread_owner.get()) is not None and known[0] is self:
            return trace.INVALID_SPAN_CONTEXT  # a thread that was started in it works for others by now
        return self.own_span_context()

    def own_span_context(self) -> SpanContext:
        """Its own, wherever this is asked."""
        known = self._context
        if known is None:
            known = self._context = self._span_ids.request
        return known

    def is_recording(self) -> bool:
        return not self.ended and self.handle != 0

    def set_attribute(self, key: str, value: types.AttributeValue) -> None:
        if self.is_recording() and _is_key(key) and self._has_room_for(key):
            self.record_attribute(key, self._limits.truncate_value(value))

    def _has_room_for(self, key: str) -> bool:
        """What has a value may get another one, however many there are."""
        keys = self._attribute_keys
        if keys is None:
            keys = self._attribute_keys = set()
        if key not in keys and len(keys) >= self._limits.attributes:
            return False
        keys.add(key)
        return True

    def set_attributes(self, attributes: Mapping[str, types.AttributeValue]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(self, name: str, attributes: types.Attributes = None, timestamp: int | None = None) -> None:
        if self.is_recording() and self._event_count < self._limits.events:
            self._event_count += 1
            at = max(_wall_to_monotonic(timestamp), self.arrived_at)  # before that nobody knows the request
            self.record_event(events.SpanEventAdded(at, str(name), self._limit_attributes(attributes)))

    def add_link(self, context: SpanContext, attributes: types.Attributes = None) -> None:
        if self.is_recording() and context.is_valid and self._link_count < self._limits.links:
            self._link_count += 1
            at, span_id = _clock.now(), context.span_id.to_bytes(8, "big")
            self.record_event(events.SpanLinked(at, context.trace_id.to_bytes(16, "big"), span_id))
            if attributes:
                self.record_event(events.LinkDescribed(at, span_id.hex(), self._limit_attributes(attributes)))

    def _limit_attributes(self, attributes: types.Attributes) -> dict[str, events.Value]:
        return {
            key: self._limits.truncate_value(value)
            for key, value in (attributes or {}).items()
            if _is_key(key)
        }

    def update_name(self, name: str) -> None:
        if self.is_recording():
            self.record_event(events.NameUpdated(_clock.now(), str(name)))

    def set_status(self, status: Any, description: str | None = None) -> None:
        code = getattr(status, "status_code", status)
        if code is trace.StatusCode.ERROR:
            self._has_error_status = True
        elif code is trace.StatusCode.OK:
            self._has_error_status, self._engine_error = False, ""

    def record_exception(
        self,
        exception: BaseException,
        attributes: types.Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Notes the exception's type; its message never leaves the process."""
        self.add_event("exception", {"exception.type": type(exception).__qualname__}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """The span ends with its request, which whoever opened it closes."""

    # ── current ──────────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self) -> Any:
        """Makes the request current here; give the token to `detach`."""
        span = self if self.provider_spans is None else self.provider_spans[1]
        return context.attach(Context({**self.around, _REQUEST_KEY: self, context.SPAN_KEY: span}))


ThreadOwner = tuple[RequestSpan, object]
thread_owner: ContextVar[ThreadOwner | None] = ContextVar("otel_infer-lent", default=None)
"""The request that a thread was started in, and the span that was current there."""

span_factory: SpanFactory | None = None
"""Set by the composition root."""


pending_provider_spans = PendingProviderSpans()
"""A provider's live spans of requests that are recorded."""


def to_headers(request: RequestSpan) -> dict[str, str]:
    """What to hand to another process so that it can be a child of this request."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(NonRecordingSpan(request.get_span_context())))
    return carrier


def _wall_to_monotonic(wall_at: Any) -> int:
    """The instant of a wall clock's ns; now, for what is none or has yet to come."""
    now, wall_now = _clock.read_clocks()
    try:
        return min(now - (wall_now - operator.index(wall_at)), now)
    except TypeError:
        return now


def _is_key(key: Any) -> bool:
    """As the SDK has it: other attributes are ignored."""
    return isinstance(key, str) and bool(key)
