"""Wraps the application that a server holds in an attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory


def patch_app_attribute(
    attribute: str,
    wrap_app: Callable[[Any, Hook], Any],
    is_concerned: Callable[[Any], bool] = lambda server: True,
) -> WrapperFactory:
    """Returns a wrapper factory that wraps the application held in `self.<attribute>` after the call.

    `is_concerned`: whether `self` is a server of this kind.
    """

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def call_and_wrap_app(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                if hook.alive and is_concerned(self):
                    setattr(self, attribute, wrap_app(getattr(self, attribute), hook))
            except BaseException as exc:
                hook.mark_failed(exc)
            return result

        return call_and_wrap_app

    return make_wrapper
