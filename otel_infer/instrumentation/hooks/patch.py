"""TODO instrumentation.hooks.patch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, Make, Probe, _around, _Wrapper, log
from otel_infer.instrumentation.hooks.target import Drift, Parameters, _lies_within, _parameters, resolve


class _Place(ABC):
    """One attribute of a module or class, which is ours while installed."""

    def __init__(self, target: str, reads: Sequence[str], optional: bool, part: str) -> None:
        self.module, _, self.path = target.partition(":")
        if not self.module or not self.path:
            raise ValueError(f"{target!r} is not like 'package.module:Class.method'")
        self.target = target
        self.reads = tuple(reads)
        self.optional = optional
        self.part = part
        self.hook = Hook(target)
        self.installed = False
        self._taken: tuple[Any, str, Any, Any, bool] | None = None  # owner, name, original, ours, inherited

    @property
    def active(self) -> bool:
        """Installed, and nothing of ours has raised there."""
        return self.installed and self.hook.alive

    def check(self) -> bool:
        """Whether there is a target to install on; False only for an optional one. Raises `Drift`."""
        return self._find() is not None

    def install(self) -> bool:
        """Take the place, once. False if an optional target is missing. Raises `Drift`, nothing changed."""
        if self.installed:
            return True
        found = self._find()
        if found is None:
            return False
        owner, name, current, parameters = found
        if self._taken is not None and _lies_within(current, self._taken[3]):
            self.hook.alive = True
        else:
            self.hook = Hook(
                self.target
            )  # what an earlier install left beneath somebody's wrapper stays dead
            ours = self._replacement(owner, current, parameters)
            inherited = name not in vars(owner)
            try:
                setattr(owner, name, ours)
            except (AttributeError, TypeError):
                raise Drift(self.target, "cannot be replaced") from None
            self._taken = owner, name, current, ours, inherited
        self.installed = True
        return True

    def remove(self) -> None:
        """Give the place back if it is still ours; what others have wrapped stays, and does nothing."""
        if not self.installed or self._taken is None:
            return
        self.installed = self.hook.alive = False
        owner, name, original, ours, inherited = self._taken
        if vars(owner).get(name) is not ours:
            log.warning(
                "%s was wrapped or replaced by others; ours stays in place and does nothing", self.target
            )
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        self._taken = None

    def _find(self) -> tuple[Any, str, Any, Parameters] | None:
        try:
            owner, name, current = resolve(self.module, self.path)
        except LookupError as exc:
            if self.optional:
                return None
            raise Drift(self.target, f"there is no {exc.args[0]}") from None
        if isinstance(current, type):  # a replaced class could not be unpickled to
            raise Drift(self.target, "is a class, not a function")
        if not callable(current) and not isinstance(current, (classmethod, staticmethod)):
            raise Drift(self.target, "is not a function")
        parameters = _parameters(owner, current)
        missing = [name for name in self.reads if name not in parameters]
        if missing:
            raise Drift(self.target, f"declares no parameter {', '.join(missing)}")
        return owner, name, current, parameters

    @abstractmethod
    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any: ...


class Patch(_Place):
    """A probe around every call of `target`; `reads` are the arguments the probe asks its `Call` for."""

    def __init__(
        self, target: str, probe: Probe, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.probe = probe

    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        method = isinstance(owner, type) and not isinstance(current, (classmethod, staticmethod))
        ours = _Wrapper(current, _around(self.probe, self.hook, parameters, method))
        ours._self_home = owner
        return ours


class StepHook(_Place):
    """`make(original, hook)` in the place of `target`: a function of its kind, calling `original` once."""

    def __init__(
        self, target: str, make: Make, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.make = make

    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        kind = type(current)
        if kind in (classmethod, staticmethod):
            return kind(self._made(current.__func__))
        if isinstance(owner, type) and hasattr(
            current, "__get__"
        ):  # a wrapper of others must know that it is bound
            current = current.__get__(None, owner)
        return self._made(current)

    def _made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(self.make(original, self.hook))
