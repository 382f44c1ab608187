"""A provider's own live spans of requests, until what was seen of these is written into them and they are ended."""

from __future__ import annotations

import contextlib

from opentelemetry import trace

ProviderSpans = tuple[trace.Span | None, trace.Span]
"""A provider's own live spans of a request: server span, if there is one, and request span."""
MAX_PENDING = 8192
"""As many as can be in flight, and as many again that have ended and are not concluded."""


class PendingProviderSpans:
    """A provider's live spans by the id of their request, until it is concluded. Where that never happens, because its facts
    were lost, they end as they are when so many others have come."""

    def __init__(self, most: int = MAX_PENDING) -> None:
        self._max_pending = most
        self._spans: dict[bytes, ProviderSpans] = {}

    def add(self, span_id: bytes, inner: ProviderSpans) -> None:
        """They wait from now on."""
        self._spans[span_id] = inner
        if len(self._spans) > self._max_pending:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread put or claimed meanwhile
                oldest = self.pop(next(iter(self._spans)))
                if oldest is not None:
                    end_spans(oldest)

    def pop(self, span_id: bytes) -> ProviderSpans | None:
        """The spans of this request, once; who claims them ends them."""
        return self._spans.pop(span_id, None)


def end_spans(inner: ProviderSpans) -> None:
    """Ends them now, with what they say by now; never raises."""
    for span in reversed(inner):
        if span is not None:
            with contextlib.suppress(Exception):  # a processor of the user's
                span.end()
