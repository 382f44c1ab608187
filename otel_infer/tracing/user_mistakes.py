"""Keeps mistakes of user code in calls of the public API from reaching that code: logged once, counted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
MAX_TIMEOUT_S = 86400.0

_reported: set[str] = set()
_count = 0


def count_mistakes() -> int:
    """Returns how many calls of this process were not recorded because of their arguments."""
    return _count


def report_mistake(item: str, error: BaseException) -> None:
    """Counts that an item is not recorded, and logs it once per `item`.

    The exception's message is never logged, because it may quote its input.
    """
    global _count
    _count += 1
    if item not in _reported:
        _reported.add(item)
        logging.getLogger("otel_infer").warning("%s is not recorded: %s", item, type(error).__name__)


def ignore_mistakes(item: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Returns a decorator for a method that records `item`: an exception in it is reported, and not raised."""

    def wrap_method(method: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(method)
        def call_method(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                method(*args, **kwargs)
            except Exception as error:  # an argument may raise in any of its methods
                report_mistake(item, error)

        return call_method

    return wrap_method


def to_name(value: Any, default: str) -> str:
    """Returns the text of a name that user code gives; `default` if the value has no text."""
    try:
        return str.__str__(value) if isinstance(value, str) else str(value)
    except Exception as error:
        report_mistake(f"the name of {default}", error)
        return default


def to_seconds(timeout: Any, default: float) -> float:
    """Returns a timeout that user code gives, s, at most a day; `default` if it is not one."""
    try:
        return min(max(float(timeout), 0.0), MAX_TIMEOUT_S) if timeout == timeout else default
    except Exception as error:
        report_mistake("the timeout of flush", error)
        return default
