"""Turns any value that user code sets on a span into plain data that JSON takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 8
_INT64 = 1 << 63


def to_plain(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Returns the value as strings, numbers, lists and mappings of them, at most `depth` levels deep.

    An integer beyond 64 bits becomes hexadecimal text, because `str` refuses one over 4300 digits. An object
    becomes its `str`, or the name of its type where that raises.
    """
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else hex(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping) and depth:
        return {_describe(key): to_plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str) and depth:
        return [to_plain(item, depth - 1) for item in value]
    return _describe(value)


def _describe(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a user's object may raise anything; a cycle ends in a RecursionError
        return f"<{type(value).__name__}>"
