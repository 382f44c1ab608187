"""A function of ours among those that a library calls: for what has a list of callbacks and no function to be hooked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import TargetMismatch, resolve_target

CallbackFactory = Callable[[Hook], Callable[..., Any]]


class CallbackPatch:
    """What `make(hook)` returns, at the end of the list `target` while installed; a `Patch` to whoever installs it."""

    optional = False

    def __init__(self, target: str, make: CallbackFactory, part: str) -> None:
        self.module, _, self.path = target.partition(":")
        self.target, self.make, self.part = target, make, part
        self.hook = Hook(target)
        self.installed = False
        self._callback: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """Still in the list, and nothing of ours has raised there."""
        return self.installed and self.hook.alive and self._is_in_list()

    def check_target(self) -> bool:
        """Raises `Drift` where there is no such list."""
        return self._resolve_list() is not None

    def install(self) -> bool:
        """Into the list, once. Raises `Drift`."""
        if self.installed and self._is_in_list():
            return True
        self.hook = Hook(self.target)
        self._callback = self.make(self.hook)
        self._resolve_list().append(self._callback)
        self.installed = True
        return True

    def remove(self) -> None:
        """Out of the list, if others have not emptied it."""
        was_installed, self.installed, self.hook.alive = self.installed, False, False
        if was_installed and self._is_in_list():
            self._resolve_list().remove(self._callback)

    def _is_in_list(self) -> bool:
        return self.module in sys.modules and any(one is self._callback for one in self._resolve_list())

    def _resolve_list(self) -> list[Any]:
        try:
            listeners = resolve_target(self.module, self.path)[2]
        except LookupError as exc:
            raise TargetMismatch(self.target, f"there is no {exc.args[0]}") from None
        if not isinstance(listeners, list):
            raise TargetMismatch(self.target, "is not a list")
        return listeners
