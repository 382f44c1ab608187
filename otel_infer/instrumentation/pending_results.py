"""Follows results that a library computes in its threads, and that the caller asks for one by one: a call ends with its last one.

    call(asynchronous=True) ─▶ [result, …] ─ result.result() in the caller's threads ─▶ … ─ the last is read or dropped ─▶ the end

A result is read only by the caller: CTranslate2's can be waited for by one thread (4.8, a second one crashes the process).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook


class PendingResults:
    """Results of a call that runs in the library's threads. It ends when all have been read or dropped. `end`: of the call."""

    def __init__(self, results: list[Any], end: Callable[..., None], hook: Hook) -> None:
        self._ends, self._hook = [end], hook  # a list, so that one thread takes it
        self._values: list[Any] = [None] * len(results)
        self._waiting = {id(each): (number, self._refer(each)) for number, each in enumerate(results)}
        _pending.update(dict.fromkeys(self._waiting, self))
        self._end_if_last()

    def _refer(self, result: Any) -> weakref.ref[Any]:
        key = id(result)
        return weakref.ref(result, lambda _: self._note(key, None))

    def note(self, result: Any, value: Any) -> None:
        """Notes the value of a result."""
        self._note(id(result), value)

    def _note(self, key: int, value: Any) -> None:
        if key in self._waiting:
            self._values[self._waiting[key][0]] = value
            _pending.pop(key, None)
            self._waiting.pop(key, None)
            self._end_if_last()

    def _end_if_last(self) -> None:
        if not self._waiting:
            is_left = bool(self._values) and all(each is None for each in self._values)
            self._end(self._values, GeneratorExit() if is_left else None)

    def fail(self, exc: BaseException) -> None:
        """Ends the call, because a result raised."""
        for key in list(self._waiting):
            _pending.pop(key, None)
        self._end(None, exc)

    def _end(self, values: list[Any] | None, exc: BaseException | None) -> None:
        with contextlib.suppress(IndexError):
            end = self._ends.pop()
            call_safely(self._hook, end, values, exc)


_pending: dict[int, PendingResults] = {}
"""Calls that run in the library's threads, by the ids of their results."""


def wrap_result(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A factory for the method that waits for a result and returns its value, or raises."""

    def result(self: Any) -> Any:
        known = _pending.get(id(self))
        try:
            value = original(self)
        except BaseException as exc:
            if known is not None:
                known.fail(exc)
            raise
        if known is not None:
            call_safely(hook, known.note, self, value)
        return value

    return result
