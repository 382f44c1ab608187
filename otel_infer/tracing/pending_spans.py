"""Live spans that a user's provider started for requests, held until the records are written into them."""

from __future__ import annotations

import contextlib

from opentelemetry import trace

ProviderSpans = tuple[trace.Span | None, trace.Span]
"""A provider's live spans of a request: its server span (None if there is none) and its request span."""
MAX_PENDING = 8192
"""Requests that can be in flight, and as many that have ended and are not concluded."""


class PendingProviderSpans:
    """A provider's live spans by span id of their request, until it is concluded.

    A request is never concluded if its events were lost. Its spans are ended unchanged once `most` newer ones
    exist.
    """

    def __init__(self, most: int = MAX_PENDING) -> None:
        self._max_pending = most
        self._spans: dict[bytes, ProviderSpans] = {}

    def add(self, span_id: bytes, spans: ProviderSpans) -> None:
        """Adds the spans of a request; ends the oldest spans if there are too many."""
        self._spans[span_id] = spans
        if len(self._spans) > self._max_pending:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread added or popped meanwhile
                oldest = self.pop(next(iter(self._spans)))
                if oldest is not None:
                    end_spans(oldest)

    def pop(self, span_id: bytes) -> ProviderSpans | None:
        """Removes and returns the spans of a request, which the caller must end; None if there are none."""
        return self._spans.pop(span_id, None)


def end_spans(spans: ProviderSpans) -> None:
    """Ends the spans now with their current data; never raises."""
    for span in reversed(spans):
        if span is not None:
            with contextlib.suppress(Exception):  # a span processor of the user may raise
                span.end()
