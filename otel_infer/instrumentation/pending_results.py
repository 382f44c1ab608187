"""Follows results that a library computes in its threads, and that the caller asks for one by one: a call ends with its last one.

call(asynchronous=True) ─▶ [result, …] ─ result.result() ─▶ its value, and those of the others that are there ─ … ─▶ the end
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook


class PendingResults:
    """Results of a call that runs in the library's threads. It ends when all have been read or dropped. `end`: of the call."""

    def __init__(self, results: list[Any], end: Callable[..., None], hook: Hook) -> None:
        self._end, self._hook = end, hook
        self._values: list[Any] = [None] * len(results)
        self._waiting = {id(each): (number, self._refer(each)) for number, each in enumerate(results)}
        _pending.update(dict.fromkeys(self._waiting, self))

    def _refer(self, result: Any) -> weakref.ref[Any]:
        key = id(result)
        return weakref.ref(result, lambda _: self._end_one(key, None))

    def note(self, result: Any, value: Any, read: Callable[[Any], Any]) -> None:
        """Notes the value of a result, and those of the others that are there already. `read`: returns one's value, or raises."""
        self._end_one(id(result), value)
        for key, (_, reference) in list(self._waiting.items()):
            other = reference()
            if other is not None and not other.done():
                break
            try:
                self._end_one(key, None if other is None else read(other))
            except Exception as exc:
                self.fail(exc)

    def _end_one(self, key: int, value: Any) -> None:
        _pending.pop(key, None)
        number, _ = self._waiting.pop(key, (-1, None))
        if number < 0:
            return
        self._values[number] = value
        if not self._waiting:
            is_left = all(each is None for each in self._values)
            call_safely(self._hook, self._end, self._values, GeneratorExit() if is_left else None)

    def fail(self, exc: BaseException) -> None:
        """Ends the call, because a result raised."""
        for key in self._waiting:
            _pending.pop(key, None)
        self._waiting.clear()
        call_safely(self._hook, self._end, None, exc)


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
            call_safely(hook, known.note, self, value, original)
        return value

    return result
