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
from otel_infer.tracing.pending_spans import Unclaimed, end
from otel_infer.tracing.span_ids import ByIds, Limits, Opened, Opener

_KEY = otel_context.create_key("otel_infer-request")
_NOTHING = Context()


class LiveRequest(trace.Span):
    """A request in flight: a live span for everybody else, and for integrations the place where its facts are stated.

    All `*_at` are monotonic ns; 0 = not yet.
    """

    # What most requests never change costs none of them a store.
    ended = named = tokenizing = False
    responding = tokens_reached = first_token_sent = False
    operation = engine = ""
    detokenize_ns = 0
    _keys: set[str] | None = None
    _events = _links = 0
    _failed = _seen = False
    _engine_failed = _id = _response_id = ""
    _name = ("", "", "")
    _context: SpanContext | None = None

    def __init__(
        self, opened: Opened | ByIds, handle: int, arrived_at: int, owner: str, around: Context
    ) -> None:
        """`around`: what `attach` starts from; the caller's baggage lies in it.

        `tokenizing`: an engine does, and says so itself. `has_server`: the SERVER span above it is ours. `has_news`: the next piece of the response may be the first, or the
        first with a token.
        """
        self._opened, self.around = opened, around
        self.inner = opened.inner
        self.handle, self.arrived_at, self.owner = handle, arrived_at, owner
        self.has_server = opened.has_server
        self.chunks = self.send_wait_ns = 0
        self.has_news = True

    @property
    def server(self) -> SpanContext | None:
        """Of the SERVER span above it, where that is ours."""
        return self._opened.server

    @property
    def _room(self) -> Limits:
        return opener.limits if opener is not None else Limits()

    @property
    def packed(self) -> bytes:
        """The handle as it stands in a step's columns."""
        return self.handle.to_bytes(4, "little")

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self, fact: Any) -> None:
        """States a fact about this request."""
        recorder.state(self.handle, fact)

    def stage(self, name: str, started_at: int, items: int = 0) -> None:
        """A stage of this name is over."""
        recorder.state(self.handle, events.StageEnded(_clock.now(), started_at, name, items))

    def submitted(self, engine: str, sequences: int = 1, input_tokens: int = 0, max_tokens: int = 0) -> None:
        """Handed over to the engine."""
        self.engine = engine
        said = events.count(sequences), events.count(input_tokens), events.count(max_tokens)
        recorder.state(self.handle, events.RequestSubmitted(_clock.now(), *said, engine))

    def name(self, operation: str = "", provider: str = "", model: str = "") -> None:
        """What became known after arrival: operation, provider (engine), served model. Said once: a thousand inputs of one request
        would fill the ring."""
        name = operation, provider, model
        if name != self._name:
            self._name = name
            self._say_known(
                *zip((semconv.OPERATION_NAME, semconv.PROVIDER_NAME, semconv.REQUEST_MODEL), name)
            )

    def known_as(self, request_id: str) -> None:
        """How the engine calls it. Said once, as the name."""
        if request_id != self._id:
            self._id = request_id
            self.say(semconv.REQUEST_ID, request_id)

    def answers_as(self, response_id: str) -> None:
        """How its client calls the answer (`chatcmpl-…`). Said once, as the name."""
        if response_id != self._response_id:
            self._response_id = response_id
            self.say(semconv.RESPONSE_ID, response_id)

    def asked(self, tenant: str, traffic_class: str) -> None:
        """Who asks, and whether somebody waits for it."""
        self._say_known((semconv.TENANT, tenant), (semconv.TRAFFIC_CLASS, traffic_class))

    def _say_known(self, *said: tuple[str, str]) -> None:
        for key, value in said:
            if value:
                self.say(key, value)

    def say(self, key: str, value: events.Value) -> None:
        """An attribute of ours on the request span, outside the limits of user code."""
        recorder.state(self.handle, events.AttributeSet(_clock.now(), key, value))

    def failed(self, error_type: str) -> None:
        """The engine failed it; whoever closes it will say so. Empty: a later attempt did not fail."""
        self._engine_failed = error_type and (self._engine_failed or error_type)

    def token_reached(self) -> None:
        """A token reached the side of the server that talks to the reader."""
        if not self.tokens_reached:
            self.tokens_reached = self.has_news = True
            recorder.state(self.handle, events.TokenReached(_clock.now()))

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
        self.around = _NOTHING  # in it may be the request before, which a connection's reader has kept
        if self.inner is not None:  # where a provider records, user code says it to that one's span
            self.set_status(getattr(self.inner[1], "status", None))
        if self._engine_failed and outcome != events.ABORTED:  # what was made of it says less
            outcome, error_type = events.ERROR, self._engine_failed
        elif self._failed and outcome == events.OK:
            outcome, error_type = events.ERROR, semconv.OTHER
        at = at or _clock.now()
        said = at, outcome, error_type, status_code, self.chunks, self.send_wait_ns, self.detokenize_ns
        if not (self.has_server or self._seen or self.engine or self.inner) and self._opened.parent:
            self._withdraw()
        if http:
            recorder.close(self.handle, tuple.__new__(events.ExchangeEnded, (*said, route, http)))
        else:
            recorder.close(self.handle, tuple.__new__(events.RequestEnded, said))
        if not self.handle and self.inner is not None:  # nobody will hear of it
            end(self.inner)

    def _withdraw(self) -> None:
        """Whoever asks from now on, in a task that outlives the request, is told of the span above."""
        own, self._context = self._context, self._opened.parent or self._context
        if self._seen:  # another thread has asked just now
            self._context = own
        else:
            self.state(events.SpanUnseen(_clock.now()))

    def __deepcopy__(self, memo: Any) -> LiveRequest:
        """Engines copy their own objects, which may carry this one: it stays one request."""
        return self

    # ── the API's span ───────────────────────────────────────────────────────────────────────────────────────────

    def get_span_context(self) -> SpanContext:
        self._seen = True
        if self.ended and (known := lent.get()) is not None and known[0] is self:
            return trace.INVALID_SPAN_CONTEXT  # a thread that was started in it works for others by now
        return self.known_context()

    def known_context(self) -> SpanContext:
        """Its own, wherever this is asked."""
        known = self._context
        if known is None:
            known = self._context = self._opened.request
        return known

    def is_recording(self) -> bool:
        return not self.ended and self.handle != 0

    def set_attribute(self, key: str, value: types.AttributeValue) -> None:
        if self.is_recording() and _is_key(key) and self._has_room_for(key):
            self.say(key, self._room.cut(value))

    def _has_room_for(self, key: str) -> bool:
        """What has a value may get another one, however many there are."""
        keys = self._keys
        if keys is None:
            keys = self._keys = set()
        if key not in keys and len(keys) >= self._room.attributes:
            return False
        keys.add(key)
        return True

    def set_attributes(self, attributes: Mapping[str, types.AttributeValue]) -> None:
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(self, name: str, attributes: types.Attributes = None, timestamp: int | None = None) -> None:
        if self.is_recording() and self._events < self._room.events:
            self._events += 1
            at = max(_monotonic(timestamp), self.arrived_at)  # before that nobody knows the request
            self.state(events.EventAdded(at, str(name), self._limited(attributes)))

    def add_link(self, context: SpanContext, attributes: types.Attributes = None) -> None:
        if self.is_recording() and context.is_valid and self._links < self._room.links:
            self._links += 1
            at, span_id = _clock.now(), context.span_id.to_bytes(8, "big")
            self.state(events.SpanLinked(at, context.trace_id.to_bytes(16, "big"), span_id))
            if attributes:
                self.state(events.LinkDescribed(at, span_id.hex(), self._limited(attributes)))

    def _limited(self, attributes: types.Attributes) -> dict[str, events.Value]:
        return {key: self._room.cut(value) for key, value in (attributes or {}).items() if _is_key(key)}

    def update_name(self, name: str) -> None:
        if self.is_recording():
            self.state(events.NameUpdated(_clock.now(), str(name)))

    def set_status(self, status: Any, description: str | None = None) -> None:
        code = getattr(status, "status_code", status)
        if code is trace.StatusCode.ERROR:
            self._failed = True
        elif code is trace.StatusCode.OK:
            self._failed, self._engine_failed = False, ""

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
        span = self if self.inner is None else self.inner[1]
        return context.attach(Context({**self.around, _KEY: self, context.SPAN_KEY: span}))


Lent = tuple[LiveRequest, object]
lent: ContextVar[Lent | None] = ContextVar("otel_infer-lent", default=None)
"""The request that a thread was started in, and the span that was current there."""

opener: Opener | None = None
"""Set by the composition root."""


unclaimed = Unclaimed()
"""A provider's live spans of requests that are recorded."""


def to_headers(request: LiveRequest) -> dict[str, str]:
    """What to hand to another process so that it can be a child of this request."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(NonRecordingSpan(request.get_span_context())))
    return carrier


def _monotonic(wall_at: Any) -> int:
    """The instant of a wall clock's ns; now, for what is none or has yet to come."""
    now, wall_now = _clock.wall_pair()
    try:
        return min(now - (wall_now - operator.index(wall_at)), now)
    except TypeError:
        return now


def _is_key(key: Any) -> bool:
    """As the SDK has it: other attributes are ignored."""
    return isinstance(key, str) and bool(key)
