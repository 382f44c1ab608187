"""Calls functions of ours inside a hook: the user's call gets no exception of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory


def call_safely(hook: Hook, function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function of ours returns; None if it raises, which disables the hook."""
    try:
        return function(*args)
    except BaseException as exc:
        hook.mark_failed(exc)
        return None


def call_or_fail(
    hook: Hook, work: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a function of the library returns. What it raises ends `work`, by its `fail`, and is raised."""
    try:
        return original(*args, **kwargs)
    except BaseException as exc:
        call_safely(hook, work.fail, exc)
        raise


def call_before(note: Callable[[Any, Any], Any]) -> WrapperFactory:
    """Returns the hook of a method before which `note` is called, with the object and the method's first argument."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.alive and (args or kwargs):
                call_safely(hook, lambda: note(self, args[0] if args else next(iter(kwargs.values()))))
            return original(self, *args, **kwargs)

        return method

    return make_wrapper
