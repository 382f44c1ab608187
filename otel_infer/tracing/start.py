"""Opens the request span, the only live span, in the context of its caller.

All spans below it are written afterwards, with the instants of the recorded events. The request span is
opened on arrival, because other processes and other instrumentations need its id as their parent. It is a
span of the OpenTelemetry API without data: attributes that user code sets go to the ring, within the SDK's
limits.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context, request_span, span_ids
from otel_infer.tracing.deferred_request import CurrentRequest, DeferredRequest
from otel_infer.tracing.request_span import (
    REQUEST_KEY,
    RequestSpan,
    pending_provider_spans,
    thread_owner,
)
from otel_infer.tracing.span_ids import RemoteParent
from otel_infer.tracing.work import Work


def current_request() -> RequestSpan | None:
    """Returns the current request, which is opened now if it is deferred; None if there is none or it has ended."""
    request = context.current_context().get(REQUEST_KEY)
    if type(request) is DeferredRequest or type(request) is Work:
        request = request.open()
    return request if isinstance(request, RequestSpan) and not request.ended else None


def begin_model_call() -> RequestSpan | None:
    """Returns the request for which a model is called now: the current one, or the batch of a worker, which is complete."""
    request = context.current_context().get(REQUEST_KEY)
    return request.begin_call() if type(request) is Work else current_request()


def find_request() -> CurrentRequest | None:
    """Returns the current request, and does not open a deferred one; None if there is none or it has ended."""
    request = context.current_context().get(REQUEST_KEY)
    if type(request) is Work:
        request = request.find_single() or request.open()
    if type(request) is DeferredRequest:
        request = request.opened or request
    return request if isinstance(request, (RequestSpan, DeferredRequest)) and not request.ended else None


def _find_finished_request() -> RequestSpan | None:
    """Returns the request that this task or thread started in, if it has ended and no other span is current."""
    span = context.current_span()
    request = context.current_context().get(REQUEST_KEY)
    if type(request) is Work:
        request = request.single
    if isinstance(request, RequestSpan):
        is_finished = request.ended and not request.is_forked
        return request if is_finished and span is request.current_span else None
    owner = thread_owner.get()
    if owner is None or not owner[0].ended or span is not owner[1]:
        return None
    return owner[0]


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
    """Opens a request as a child of `headers` (by OTEL_PROPAGATORS) or of the span in `around`.

    Returns None while nothing records. `around`: default is the current context. In a task or thread that
    outlived the request it started in, the default is an empty context, and a link refers to that request:
    a worker that the first request started serves all later ones. `server`:
    an own SERVER span is put above the request, unless `around` has a local span. `owner`: the instrumentor
    that closes it.
    """
    if request_span.span_factory is None or not recorder.active:
        return None
    now = _clock.now()
    arrived_at = arrived_at or now
    wall_at = _clock.wall_now() - now + arrived_at
    if not (server or headers or around or context.current_context() or thread_owner.get()):
        flags = 0 if generative else events.NON_GENERATIVE
        root = _open_root(arrived_at, wall_at, flags, (operation, provider, model, name), owner)
        if root is not None:
            return root
    finished = _find_finished_request() if around is None else None
    if finished is not None:
        around = Context()
    parent = context.current_context() if around is None else around
    parent_span = context.span_context(parent)
    own_server = server and (parent_span.is_remote or not parent_span.is_valid)
    if headers and own_server:
        parent = context.extract(headers, parent)
        parent_span = context.span_context(parent)
    ids = request_span.span_factory.create_span(name, parent, parent_span, own_server, wall_at)
    flags = ids.flags if generative else ids.flags | events.NON_GENERATIVE
    fields = arrived_at, wall_at, *ids.ids, flags, operation, provider, model, name
    # `tuple.__new__` saves the call of the event's own `__new__`.
    arrived = tuple.__new__(events.RequestArrived, fields)
    request = RequestSpan(ids, recorder.open_request(arrived), arrived_at, owner, parent)
    if ids.trace_state and (state := span_ids.select_sampling_fields(ids.trace_state)):
        request.record_event(events.StateCarried(now, state))
    if ids.provider_spans is not None and request.handle:
        pending_provider_spans.add(arrived.span_id, ids.provider_spans)
    if finished is not None:
        request.add_link(finished.own_span_context())
    return request


def _open_root(
    at: int, wall_at: int, flags: int, names: tuple[str, str, str, str], owner: str
) -> RequestSpan | None:
    """Opens a request of a new trace, without a SERVER span: of a batch, for example. This takes few calls.

    Returns None where the sampler or the id generator must be called.
    """
    sampler = request_span.span_factory.plain_sampler if request_span.span_factory is not None else None
    if sampler is None:
        return None
    ids = span_ids.make_root_ids(sampler, own_server=False)
    arrived = tuple.__new__(events.RequestArrived, (at, wall_at, *ids.ids, ids.flags | flags, *names))
    return RequestSpan(ids, recorder.open_request(arrived), at, owner, Context())


def open_request_below_remote(
    remote: RemoteParent, name: str, owner: str, around: Context, arrived_at: int
) -> RequestSpan | None:
    """Opens a request below an own SERVER span, whose parent is `remote`.

    Returns None while nothing records. `around`: a context without a span.
    """
    if request_span.span_factory is None or not recorder.active:
        return None
    ids = request_span.span_factory.create_below_remote(remote)
    if ids is None:
        if (span := span_ids.to_span_context(remote)) is not None:
            around = trace.set_span_in_context(NonRecordingSpan(span), around)
        return open_request(name, owner=owner, around=around, server=True, arrived_at=arrived_at)
    wall_at = _clock.wall_now() - _clock.now() + arrived_at
    fields = arrived_at, wall_at, *ids.ids, ids.flags, "", "", "", name
    arrived = tuple.__new__(events.RequestArrived, fields)
    return RequestSpan(ids, recorder.open_request(arrived), arrived_at, owner, around)
