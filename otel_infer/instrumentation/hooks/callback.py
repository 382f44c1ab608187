"""Adds a callback of ours to a library's list of callbacks, for libraries that offer no function to patch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import TargetMismatch, resolve_target

CallbackFactory = Callable[[Hook], Callable[..., Any]]


class CallbackPatch:
    """A callback, made by `make(hook)`, that is the last entry of the list `target` while installed.

    It has the interface of `FunctionPatch` and `HotPathPatch`, so that parts treat all three alike.
    """

    optional = False
    part = ""

    def __init__(self, target: str, make: CallbackFactory) -> None:
        self.module, _, self.path = target.partition(":")
        self.target, self.make = target, make
        self.hook = Hook(target)
        self.installed = False
        self._callback: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """True while the callback is in the list and has not failed."""
        return self.installed and self.hook.alive and self._is_in_list()

    def check_target(self) -> bool:
        """Returns True. Raises `TargetMismatch` if there is no such list."""
        return self._resolve_list() is not None

    def install(self) -> bool:
        """Appends the callback to the list, unless it is there already. Raises `TargetMismatch`."""
        if self.installed and self._is_in_list():
            return True
        self.hook = Hook(self.target)
        self._callback = self.make(self.hook)
        self._resolve_list().append(self._callback)
        self.installed = True
        return True

    def remove(self) -> None:
        """Removes the callback from the list, if it is still there."""
        was_installed, self.installed, self.hook.alive = self.installed, False, False
        if was_installed and self._is_in_list():
            self._resolve_list().remove(self._callback)

    def _is_in_list(self) -> bool:
        return self.module in sys.modules and any(entry is self._callback for entry in self._resolve_list())

    def _resolve_list(self) -> list[Any]:
        try:
            callbacks = resolve_target(self.module, self.path)[2]
        except LookupError as exc:
            raise TargetMismatch(self.target, f"there is no {exc.args[0]}") from None
        if not isinstance(callbacks, list):
            raise TargetMismatch(self.target, "is not a list")
        return callbacks
