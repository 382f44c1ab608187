"""Who tells of a forward pass: while a thread works inside a claim, `torch` keeps silent about the models it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer.patching import Hook


class _Claims(threading.local):
    """How many claims this thread is inside of."""

    depth = 0


claims = _Claims()


def claiming(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A step hook that claims whatever runs inside `original`; to be put on functions that return no stream."""

    def claimed(*args: Any, **kwargs: Any) -> Any:
        claims.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            claims.depth -= 1

    return claimed
