"""`item` and `batch` of the manual API: a batch that is put together where no hook sees it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from otel_infer.instrumentation.batches import ALL_IN_QUEUE, WaitingItem, begin_batch, describe_item
from otel_infer.instrumentation.manual._scope import TracedScope
from otel_infer.tracing.context import detach
from otel_infer.tracing.user_mistakes import report_mistake


class item:  # noqa: N801 - used like a function
    """The current request, to be stored beside its item until `batch`. The time until then is its `queue wait`.

    Empty without a current request.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting = describe_item()

    def take(self) -> WaitingItem | None:
        """Returns what waits, once; None if there was no request."""
        waiting, self._waiting = self._waiting, None
        return waiting


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
            self._token = begin_batch(taken, ALL_IN_QUEUE)
        except Exception as exc:
            report_mistake("a batch", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._token is not None:
            detach(self._token)
            self._token = None
