"""The request span, live during the request: a child of its caller, the parent of spans that start in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.util import types

from otel_infer import _clock, semconv
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.live_threads import note_thread
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context
from otel_infer.tracing.pending_spans import PendingProviderSpans, end_spans
from otel_infer.tracing.request_state import RequestState
from otel_infer.tracing.span_ids import LazySpanIds, Limits, SpanFactory, SpanIds
from otel_infer.tracing.user_mistakes import ignore_mistakes

REQUEST_KEY = otel_context.create_key("otel_infer-request")
_EMPTY_CONTEXT = Context()
ID_KEYS = semconv.REQUEST_ID, semconv.RESPONSE_ID
"""Attributes of the engine's id of a request, and of the id of its response."""
MAX_SHORT_NAME = 30
"""Characters of a name whose UTF-8 fits the string table (126 bytes) in any script."""


class RequestSpan(RequestState, trace.Span):
    """A request in flight: a live span of the API, through which instrumentors record the request's events."""

    operation = engine = ""
    is_forked = False
    """The parent process of this one records the request; what this process does is below it."""
    _attribute_keys: set[str] | None = None
    _event_count = 0
    _has_ok_status = _is_context_read = False
    _request_id = _response_id = ""
    _expected_names = ("", "", "")
    _context: SpanContext | None = None

    def __init__(
        self, ids: SpanIds | LazySpanIds, handle: int, arrived_at: int, owner: str, around: Context
    ) -> None:
        """Creates the span of an opened request.

        `owner`: the instrumentor that closes it. `around`: the context that `attach` extends; it holds the
        caller's baggage.
        """
        self._span_ids, self.around = ids, around
        self.provider_spans = None if type(ids) is LazySpanIds else ids.provider_spans
        self.handle, self.arrived_at, self.owner = handle, arrived_at, owner
        self.has_server = ids.has_server
        self.inspect_next_chunk = True
        writer = recorder.requests
        if writer is not None:
            self.ring = writer.compiled

    @property
    def server(self) -> SpanContext | None:
        """Returns the context of this package's SERVER span above the request; None if there is none."""
        return self._span_ids.server

    @property
    def _limits(self) -> Limits:
        return span_factory.limits if span_factory is not None else Limits()

    @property
    def packed(self) -> bytes:
        """Returns the handle as it is packed in the columns of a step."""
        return self.handle.to_bytes(4, "little")

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _record_event(self, event: Any) -> None:
        """Records an event where compiled code has not."""
        writer = recorder.requests
        if writer is not None and self.handle:
            try:
                writer.write_event(self.handle, event)
            except Exception as error:  # the request continues unrecorded
                recorder.report_lost_event(error)

    def call_in_thread(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function for this request alone, in this thread, which is known to the reader until it returns.

        The first thread of a request stays known while it works: a later one usually waits for its result.
        """
        writer = recorder.requests
        entry = note_thread(writer.threads, self.handle, _clock.now()) if writer is not None else -1
        try:
            return call(*args, **kwargs)
        finally:
            if writer is not None and entry >= 0:
                writer.threads[entry] = 0

    def _write_stage(self, at: int, name: str, started_at: int, items: int) -> None:
        self.record_event(events.make_tuple(events.StageEnded, (at, started_at, name, items)))

    def _write_token_reached(self, at: int) -> None:
        self.record_event(events.make_tuple(events.TokenReached, (at,)))

    def record_submitted(
        self, engine: str, sequences: int = 1, input_tokens: int = 0, max_tokens: int = 0
    ) -> None:
        """Records the hand-over to the engine. `input_tokens`, `max_tokens`: 0 = unknown."""
        self.engine = engine
        counts = sequences, input_tokens, max_tokens
        if {*map(type, counts)} != {int} or not 0 <= min(counts) <= max(counts) <= events.MAX_COUNT:
            counts = tuple(map(events.clamp_count, counts))  # type: ignore[assignment]
        self.record_event(events.make_tuple(events.RequestSubmitted, (_clock.now(), *counts, engine)))

    def set_operation(self, operation: str = "", provider: str = "", model: str = "") -> None:
        """Records operation, provider (engine) and served model, if they become known after arrival.

        Unchanged values are not recorded again, because a request with a thousand inputs would fill the ring.
        """
        names = operation, provider, model
        if not self.record_names(names) and names != self._operation_names:
            self._operation_names = names
            if len(model) <= MAX_SHORT_NAME and len(operation) <= MAX_SHORT_NAME:
                self.record_event(events.make_tuple(events.OperationNamed, (_clock.now(), *names)))
            else:  # the string table would cut it
                self._record_attributes(*zip(events.OPERATION_KEYS, names))

    def set_execution_provider(self, provider: str) -> None:
        """Records where the model runs; "" = unknown."""
        if not provider:
            return
        if len(provider) <= MAX_SHORT_NAME:
            self.record_event(events.make_tuple(events.ModelPlaced, (_clock.now(), provider)))
        else:  # the string table would cut it
            self.record_attribute(events.EXECUTION_PROVIDER, provider)

    def expect_operation(self, operation: str, provider: str, model: str) -> None:
        """Stores the names of an inference that is still prepared. They are recorded if it fails on the way.

        A request that is only tokenized, or refused, is no inference.
        """
        self._expected_names = operation, provider, model

    def set_request_id(self, request_id: str) -> None:
        """Records the engine's id of the request, unless it is unchanged."""
        if request_id != self._request_id:
            self._request_id = request_id
            self.record_attribute(semconv.REQUEST_ID, request_id)

    def set_response_id(self, response_id: str) -> None:
        """Records the id of the response (`chatcmpl-…`), unless it is unchanged."""
        if response_id != self._response_id:
            self._response_id = response_id
            self.record_attribute(semconv.RESPONSE_ID, response_id)

    def set_caller(self, tenant: str, traffic_class: str) -> None:
        """Records the caller's tenant and traffic class; an empty one is not recorded."""
        self._record_attributes((semconv.TENANT, tenant), (semconv.TRAFFIC_CLASS, traffic_class))

    def _record_attributes(self, *attributes: tuple[str, str]) -> None:
        for key, value in attributes:
            if value:
                self.record_attribute(key, value)

    def record_attribute(self, key: str, value: events.Value) -> None:
        """Records an attribute of this package, which does not count towards the SDK's limits."""
        self.record_event(events.make_tuple(events.AttributeSet, (_clock.now(), key, value)))

    def set_engine_error(self, error_type: str) -> None:
        """Sets the error type of an engine failure, for `close`. Empty: a later attempt did not fail."""
        self._engine_error = error_type and (self._engine_error or error_type)

    def close(
        self,
        outcome: int = events.OK,
        error_type: str = "",
        status_code: int = 0,
        at: int = 0,
        http: int = 0,
        route: str = "",
    ) -> None:
        """Closes the request; a second call does nothing. `http`, `route`: as in `ExchangeEnded`."""
        if self.ended:
            return
        self.ended, self.on_token_reached = True, None
        self.around = _EMPTY_CONTEXT  # it may hold an earlier request of the same connection
        if self.provider_spans is not None:  # user code sets the status of the provider's span
            self.set_status(getattr(self.provider_spans[1], "status", None))
        if self._engine_error and outcome != events.ABORTED:  # more precise than the response's outcome
            outcome, error_type = events.ERROR, self._engine_error
        elif self._has_error_status and outcome == events.OK:
            outcome, error_type = events.ERROR, semconv.OTHER
        if outcome != events.OK and not self._operation_names[0] and self._expected_names[0]:
            self.set_operation(*self._expected_names)
        at = at or _clock.now()
        if outcome != events.OK and self.queued_at:
            self._write_stage(at, events.QUEUE_WAIT, self.queued_at, events.RAISED)
        end = at, outcome, error_type, status_code, self.chunks, self.send_wait_ns, self.detokenize_ns
        if (
            not (self.has_server or self._is_context_read or self.engine or self.provider_spans)
            and self._span_ids.parent
        ):
            self._use_parent_context()
        ended = (
            tuple.__new__(events.ExchangeEnded, (*end, route, http))
            if http
            else tuple.__new__(events.RequestEnded, end)
        )
        recorder.close_request(self.handle, ended)
        if not self.handle and self.provider_spans is not None:  # no record will end the spans
            end_spans(self.provider_spans)

    def _use_parent_context(self) -> None:
        """Replaces the span context, which no code has read, by the parent's.

        A task that outlives the request then reads the parent's, because the request span may not be
        exported.
        """
        own, self._context = self._context, self._span_ids.parent or self._context
        if self._is_context_read:  # another thread has read it just now
            self._context = own
        else:
            self.record_event(events.SpanUnseen(_clock.now()))

    def __deepcopy__(self, memo: Any) -> RequestSpan:
        """Returns this object: engines copy objects that may hold it, and it must stay one request."""
        return self

    # ── the API's span ──────────────────────────────────────────────────────────────────────────────────────

    def get_span_context(self) -> SpanContext:
        self._is_context_read = True
        if self.ended and (known := thread_owner.get()) is not None and known[0] is self:
            return trace.INVALID_SPAN_CONTEXT  # a thread that started during the request now does other work
        return self.own_span_context()

    def own_span_context(self) -> SpanContext:
        """Returns the span context, also where `get_span_context` returns an invalid one."""
        known = self._context
        if known is None:
            known = self._context = self._span_ids.request
        return known

    def is_recording(self) -> bool:
        return not self.ended and self.handle != 0

    @ignore_mistakes("an attribute")
    def set_attribute(self, key: str, value: types.AttributeValue) -> None:
        if self.is_recording() and _is_key(key) and self._has_room_for(key):
            self.record_attribute(key, self._limits.truncate_value(value))

    def _has_room_for(self, key: str) -> bool:
        """Returns whether the limit allows this attribute; one that is already set may always change."""
        keys = self._attribute_keys
        if keys is None:
            keys = self._attribute_keys = set()
        if key not in keys and len(keys) >= self._limits.attributes:
            return False
        keys.add(key)
        return True

    @ignore_mistakes("an attribute")
    def set_attributes(self, attributes: Mapping[str, types.AttributeValue]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    @ignore_mistakes("an event of a span")
    def add_event(self, name: str, attributes: types.Attributes = None, timestamp: int | None = None) -> None:
        if self.is_recording() and self._event_count < self._limits.events:
            self._event_count += 1
            at = max(_clock.wall_to_monotonic(timestamp), self.arrived_at)  # not before the request
            self.record_event(events.SpanEventAdded(at, str(name), self._limit_attributes(attributes)))

    @ignore_mistakes("a link")
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

    @ignore_mistakes("the name of a span")
    def update_name(self, name: str) -> None:
        if self.is_recording():
            self.record_event(events.NameUpdated(_clock.now(), str(name)))

    @ignore_mistakes("the status of a span")
    def set_status(self, status: Any, description: str | None = None) -> None:
        """Sets the status. OK is final, as in the SDK: later calls are ignored."""
        code = getattr(status, "status_code", status)
        if code is trace.StatusCode.ERROR:
            self._has_error_status = not self._has_ok_status
        elif code is trace.StatusCode.OK:
            self._has_ok_status, self._has_error_status, self._engine_error = True, False, ""

    @ignore_mistakes("an exception")
    def record_exception(
        self,
        exception: BaseException,
        attributes: types.Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Records the exception's type, with its module as in the SDK; its message never leaves the process."""
        module, name = type(exception).__module__, type(exception).__qualname__
        exception_type = f"{module}.{name}" if module and module != "builtins" else name
        self.add_event("exception", {"exception.type": exception_type}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Does nothing, because the span ends with its request, which its owner closes."""

    # ── current ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def current_span(self) -> object:
        """Returns the span that is current while this request is."""
        return self if self.provider_spans is None else self.provider_spans[1]

    def attach(self) -> Any:
        """Makes the request current here; returns the token for `detach`."""
        span = self if self.provider_spans is None else self.provider_spans[1]
        own = {REQUEST_KEY: self, context.SPAN_KEY: span}
        return context.attach(Context({**self.around, **own} if self.around else own))


ThreadOwner = tuple[RequestSpan, object]
thread_owner: ContextVar[ThreadOwner | None] = ContextVar("otel_infer-thread-owner", default=None)
"""The request that a thread was started in, and the span that was current there."""

span_factory: SpanFactory | None = None
"""Set by `_bootstrap`; None while nothing is traced."""


pending_provider_spans = PendingProviderSpans()
"""The live spans of recorded requests that a user's provider started."""


def _is_key(key: Any) -> bool:
    """Returns whether the SDK accepts the key; attributes with other keys are ignored."""
    return isinstance(key, str) and bool(key)
