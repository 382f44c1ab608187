"""Who tells of a forward pass: inside a claim, `torch` keeps silent about the models that are run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.patching import Hook

claimed: ContextVar[bool] = ContextVar("otel_infer-claimed", default=False)
"""A context variable and not one of the thread: tasks take turns on a thread, and work moves to others."""


owned: ContextVar[bool] = ContextVar("otel_infer-owned", default=False)
"""Models that are loaded in here are an engine's, which tells of them wherever they run."""


def owning(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A step hook: what `original` loads is its own."""

    def own(*args: Any, **kwargs: Any) -> Any:
        token = owned.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            owned.reset(token)

    return own


def claiming(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A step hook that claims whatever runs inside `original`; for functions that return when their work is done."""

    def claim(*args: Any, **kwargs: Any) -> Any:
        token = claimed.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            claimed.reset(token)

    return claim
