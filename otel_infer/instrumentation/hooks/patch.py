"""Replaces attributes of modules and classes by wrappers of ours, and restores them."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from otel_infer.instrumentation.hooks.probe import (
    Hook,
    Probe,
    ProbeWrapper,
    WrapperFactory,
    make_wrapper,
)
from otel_infer.instrumentation.hooks.target import (
    Parameters,
    TargetMismatch,
    calls_through,
    read_parameters,
    resolve_target,
)

log = logging.getLogger(__name__)


class _AttributePatch(ABC):
    """An attribute of a module or class, replaced by our wrapper while installed."""

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
        # owner, attribute name, original, replacement, whether the owner had inherited the attribute
        self._replaced: tuple[Any, str, Any, Any, bool] | None = None

    @property
    def active(self) -> bool:
        """True while the hook is installed and has not failed."""
        return self.installed and self.hook.alive

    def check_target(self) -> bool:
        """Returns whether the target exists; False only if it is optional. Raises `TargetMismatch`."""
        return self._find_target() is not None

    def install(self) -> bool:
        """Replaces the target, once. Returns False if an optional target is missing.

        Raises `TargetMismatch`; then nothing is changed.
        """
        if self.installed:
            return True
        target = self._find_target()
        if target is None:
            return False
        owner, name, current, parameters = target
        if self._replaced is not None and calls_through(current, self._replaced[3]):
            self.hook.alive = True
        else:
            # A new hook, so that a wrapper left below another library's wrapper stays disabled.
            self.hook = Hook(self.target)
            replacement = self._make_replacement(owner, current, parameters)
            inherited = name not in vars(owner)
            try:
                setattr(owner, name, replacement)
            except (AttributeError, TypeError):
                raise TargetMismatch(self.target, "cannot be replaced") from None
            self._replaced = owner, name, current, replacement, inherited
        self.installed = True
        return True

    def remove(self) -> None:
        """Restores the original. If others have wrapped or replaced our wrapper, it is only disabled."""
        if not self.installed or self._replaced is None:
            return
        self.installed = self.hook.alive = False
        owner, name, original, replacement, inherited = self._replaced
        if vars(owner).get(name) is not replacement:
            log.warning("%s was wrapped or replaced by others; our hook stays there, disabled", self.target)
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        self._replaced = None

    def _find_target(self) -> tuple[Any, str, Any, Parameters] | None:
        try:
            owner, name, current = resolve_target(self.module, self.path)
        except LookupError as exc:
            if self.optional:
                return None
            raise TargetMismatch(self.target, f"there is no {exc.args[0]}") from None
        if isinstance(current, type):  # instances of a replaced class could not be unpickled
            raise TargetMismatch(self.target, "is a class, not a function")
        if not callable(current) and not isinstance(current, (classmethod, staticmethod)):
            raise TargetMismatch(self.target, "is not a function")
        parameters = read_parameters(owner, current)
        missing = [name for name in self.reads if name not in parameters]
        if missing:
            raise TargetMismatch(self.target, f"declares no parameter {', '.join(missing)}")
        return owner, name, current, parameters

    @abstractmethod
    def _make_replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any: ...


class FunctionPatch(_AttributePatch):
    """A probe around every call of `target`. `reads`: the parameters that the probe reads from its `Call`."""

    def __init__(
        self, target: str, probe: Probe, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.probe = probe

    def _make_replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        method = isinstance(owner, type) and not isinstance(current, (classmethod, staticmethod))
        wrapper = ProbeWrapper(current, make_wrapper(self.probe, self.hook, parameters, method))
        wrapper._self_home = owner
        return wrapper


class HotPathPatch(_AttributePatch):
    """A function in place of `target`, made by `make(original, hook)`. It must call `original` once."""

    def __init__(
        self,
        target: str,
        make: WrapperFactory,
        reads: Sequence[str] = (),
        optional: bool = False,
        part: str = "",
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.make = make

    def _make_replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        kind = type(current)
        if kind in (classmethod, staticmethod):
            return kind(self._wrap_original(current.__func__))
        if isinstance(owner, type) and hasattr(current, "__get__"):
            # Another library's wrapper must be bound, so that it treats the call as a method call.
            current = current.__get__(None, owner)
        return self._wrap_original(current)

    def _wrap_original(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(self.make(original, self.hook))


class OnDemandPatch(HotPathPatch):
    """A `HotPathPatch` that counts as installed, but replaces its target only once `demand` was called.

    For a hook that few servers need on a function that all of them call once per token.
    """

    _is_demanded = False

    def demand(self) -> None:
        """Replaces the target from now on, while installed. Raises `TargetMismatch`."""
        if not self._is_demanded:
            self._is_demanded = True
            if self.installed:
                self._replace_target()

    def install(self) -> bool:
        if self._find_target() is None:
            return False
        if self._is_demanded and not self.installed:
            return self._replace_target()
        self.installed = True
        return True

    def remove(self) -> None:
        super().remove()
        self.installed = False

    def _replace_target(self) -> bool:
        self.installed = False
        return super().install()
