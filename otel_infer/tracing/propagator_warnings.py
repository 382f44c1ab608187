"""Keeps texts of callers out of the warnings that OpenTelemetry's propagators log.

A propagator quotes the header that it rejects (`baggage`, `tracestate`), and a header may hold user data. While this
package calls propagators, the first warning of each logger is replaced by a sentence without the text, and further
ones are dropped. Calls of other libraries are unchanged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from opentelemetry import propagate

_LOGGERS = (
    "opentelemetry.baggage",
    "opentelemetry.baggage.propagation",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
_calling_threads: set[int] = set()
_logged: set[str] = set()
_filtered: list[Any] = []
"""The propagator whose loggers have the filter."""


class _TextFilter(logging.Filter):
    """Filter that removes the text of warnings logged by threads that call propagators for this package."""

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.get_ident() not in _calling_threads:
            return True
        if record.name in _logged:
            return False
        _logged.add(record.name)
        record.msg = "a request's header was rejected; its text and further ones are not logged"
        record.args, record.exc_info, record.exc_text = (), None, None
        return True


_text_filter = _TextFilter()


def call_propagators(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call of propagators, whose warnings quote no header."""
    propagator = propagate.get_global_textmap()
    if not _filtered or _filtered[0] is not propagator:
        _add_filters(propagator)
    thread = threading.get_ident()
    _calling_threads.add(thread)
    try:
        return call(*arguments)
    finally:
        _calling_threads.discard(thread)


def _add_filters(propagator: Any) -> None:
    parts = (propagator, *(getattr(propagator, "_propagators", None) or ()))
    for name in (*_LOGGERS, *(type(part).__module__ for part in parts)):
        logging.getLogger(name).addFilter(_text_filter)  # adding it again does nothing
    _filtered[:] = [propagator]
