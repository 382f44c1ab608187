"""The one span that is live while the request is, and its context to and from other processes.

Everything below it is written afterwards, with the instants that the facts had. This one is opened on arrival, because
other processes and other instrumentations need its id as their parent. It is a span of the OpenTelemetry API that holds
no data: what user code sets on it goes to the ring, limits honoured first.

Longer than a module should be: the span, and the two ways in which it is opened, are one promise to whoever is told its id.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context, request_span, span_ids
from otel_infer.tracing.context import detach as detach
from otel_infer.tracing.request_span import (
    _REQUEST_KEY,
    RequestSpan,
    ThreadOwner,
    pending_provider_spans,
    thread_owner,
)
from otel_infer.tracing.span_ids import Caller


def current_request() -> RequestSpan | None:
    """The request that this code works for, if any."""
    found = otel_context.get_value(_REQUEST_KEY)
    return found if isinstance(found, RequestSpan) and not found.ended else None


def capture_for_thread() -> ThreadOwner | None:
    """What is to be `lent` in a thread that starts here, which may outlive the current request."""
    request = current_request()
    return (request, context.current_span()) if request is not None else thread_owner.get()


def _finished_owner() -> RequestSpan | None:
    """Whose this thread's context was, where that request is over and no other span is current."""
    known = thread_owner.get()
    if known is None or not known[0].ended or context.current_span() is not known[1]:
        return None
    return known[0]


def open_request(
    name: str,
    *,
    owner: str,
    around: Context | None = None,
    headers: Mapping[str, str] | None = None,
    server: bool = False,
    operation: str = "",
    provider: str = "",
    model: str = "",
    arrived_at: int = 0,
    generative: bool = True,
) -> RequestSpan | None:
    """A new request, child of `headers` (W3C and OTEL_PROPAGATORS) or of the span in `around`; None while nothing records.

    `around`: the current context, if not given; in a thread that has outlived the request it was started in, an empty one, and a
    link says which that was. `server`: a SERVER span of ours goes above it, unless there is one in
    `around`. `owner` is who will close it.
    """
    if request_span.span_factory is None or not recorder.active:
        return None
    now = _clock.now()
    arrived_at = arrived_at or now
    wall_at = _clock.wall_now() - now + arrived_at
    lender = _finished_owner() if around is None else None
    if lender is not None:
        around = Context()
    parent = context.current_context() if around is None else around
    above = context.span_context(parent)
    own_server = server and (above.is_remote or not above.is_valid)
    if headers and own_server:
        parent = context.extract(headers, parent)
        above = context.span_context(parent)
    opened = request_span.span_factory.create_span(name, parent, above, own_server, wall_at)
    flags = opened.flags if generative else opened.flags | events.NON_GENERATIVE
    said = arrived_at, wall_at, *opened.ids, flags, operation, provider, model, name
    # As its own `__new__` makes it, without the call.
    arrived = tuple.__new__(events.RequestArrived, said)
    request = RequestSpan(opened, recorder.open_request(arrived), arrived_at, owner, parent)
    if opened.trace_state and (state := span_ids.sampling_state(opened.trace_state)):
        request.record_event(events.StateCarried(now, state))
    if opened.provider_spans is not None and request.handle:
        pending_provider_spans.add(arrived.span_id, opened.provider_spans)
    if lender is not None:
        request.add_link(lender.own_span_context())
    return request


def open_request_from_caller(
    caller: Caller, name: str, owner: str, around: Context, arrived_at: int
) -> RequestSpan | None:
    """A new request with a SERVER span of ours above it, whose caller is known by ids; None while nothing records.

    `around`: a context without a span.
    """
    if request_span.span_factory is None or not recorder.active:
        return None
    opened = request_span.span_factory.create_from_caller(caller)
    if opened is None:
        if (span := span_ids.caller_to_span_context(caller)) is not None:
            around = trace.set_span_in_context(NonRecordingSpan(span), around)
        return open_request(name, owner=owner, around=around, server=True, arrived_at=arrived_at)
    wall_at = _clock.wall_now() - _clock.now() + arrived_at
    said = arrived_at, wall_at, *opened.ids, opened.flags, "", "", "", name
    arrived = tuple.__new__(events.RequestArrived, said)
    return RequestSpan(opened, recorder.open_request(arrived), arrived_at, owner, around)
