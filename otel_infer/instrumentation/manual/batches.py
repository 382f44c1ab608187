"""`item` and `batch` of the manual API: a batch that is put together where no hook sees it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.manual._scope import TracedScope
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.batch_request import attach_members
from otel_infer.tracing.context import detach
from otel_infer.tracing.deferred_request import CurrentRequest, DeferredRequest
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.user_mistakes import report_mistake


class item:  # noqa: N801 - used like a function
    """The current request, to be stored beside its item until `batch`. The time until then is its `queue wait`.

    Empty without a current request.
    """

    __slots__ = ("_put_at", "_request")

    def __init__(self) -> None:
        self._request: CurrentRequest | None = start.find_request()
        self._put_at = _clock.now()

    def take(self) -> RequestSpan | None:
        """Ends the wait, and returns the request; None if there is none, or it has ended."""
        request, self._request = self._request, None
        opened = request.open() if isinstance(request, DeferredRequest) else request
        if opened is None or opened.ended:
            return None
        opened.record_event(events.StageEnded(_clock.now(), self._put_at, events.QUEUE_WAIT, 0))
        return opened


class batch(TracedScope):  # noqa: N801 - used like a function
    """Code in it works for all requests of a batch: `with`, or `async with`. Make a new one for each batch.

    `items`: what `otel_infer.item()` returned in the handler of each request; None is left out. Calls of models, and
    stages, are recorded for each request, with the size of the batch. The first request is linked to the others, and
    each of them to the first.
    """

    attaches = True

    def __init__(self, items: Iterable[item | None]) -> None:
        self._items = items
        self.new_scope = functools.partial(batch, items)
        self._token: Any = None

    def __enter__(self) -> batch:
        try:
            taken = [each.take() for each in self._items if isinstance(each, item)]
            self._token = attach_members([request for request in taken if request is not None])
        except Exception as exc:
            report_mistake("a batch", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._token is not None:
            detach(self._token)
            self._token = None
