"""A function of ours among those that a library calls: for what has a list of callbacks and no function to be hooked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import Drift, resolve

MakeListener = Callable[[Hook], Callable[..., Any]]


class Listener:
    """What `make(hook)` returns, at the end of the list `target` while installed; a `Patch` to whoever installs it."""

    optional = False

    def __init__(self, target: str, make: MakeListener, part: str) -> None:
        self.module, _, self.path = target.partition(":")
        self.target, self.make, self.part = target, make, part
        self.hook = Hook(target)
        self.installed = False
        self._ours: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """Still in the list, and nothing of ours has raised there."""
        return self.installed and self.hook.alive and self._is_there()

    def check(self) -> bool:
        """Raises `Drift` where there is no such list."""
        return self._list() is not None

    def install(self) -> bool:
        """Into the list, once. Raises `Drift`."""
        if self.installed and self._is_there():
            return True
        self.hook = Hook(self.target)
        self._ours = self.make(self.hook)
        self._list().append(self._ours)
        self.installed = True
        return True

    def remove(self) -> None:
        """Out of the list, if others have not emptied it."""
        was_installed, self.installed, self.hook.alive = self.installed, False, False
        if was_installed and self._is_there():
            self._list().remove(self._ours)

    def _is_there(self) -> bool:
        return self.module in sys.modules and any(one is self._ours for one in self._list())

    def _list(self) -> list[Any]:
        try:
            listeners = resolve(self.module, self.path)[2]
        except LookupError as exc:
            raise Drift(self.target, f"there is no {exc.args[0]}") from None
        if not isinstance(listeners, list):
            raise Drift(self.target, "is not a list")
        return listeners
