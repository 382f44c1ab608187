"""Resolves targets (`module:path`) without running code of the library, and reads their parameters."""

from __future__ import annotations

import inspect
import sys
from typing import Any


class TargetMismatch(Exception):
    """A target is missing, or differs from what its instrumentor was written for."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)  # both arguments, so that the exception can be unpickled
        self.target = target
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


Parameters = dict[str, tuple[int, Any]]
"""Parameter name → position (sys.maxsize if keyword-only) and default (None if there is none)."""


def resolve_target(module: str, path: str) -> tuple[Any, str, Any]:
    """Returns the owner, the attribute name and the attribute's raw value.

    Runs no code of the library. Raises LookupError with the name of the missing module or attribute.
    """
    owner = sys.modules.get(module)
    if owner is None:
        raise LookupError(f"module {module} imported")
    *outer, name = path.split(".")
    for part in outer:
        owner = _lookup_attribute(owner, part)
    return owner, name, _lookup_attribute(owner, name)


def _lookup_attribute(owner: Any, name: str) -> Any:
    for home in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in getattr(home, "__dict__", ()):
            return home.__dict__[name]
    raise LookupError(name)


def read_parameters(owner: Any, current: Any) -> Parameters:
    """Returns the named parameters without `self` or `cls`; empty if the signature cannot be read."""
    function = current.__func__ if isinstance(current, (classmethod, staticmethod)) else current
    try:
        declared = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    bound = isinstance(owner, type) and not isinstance(current, staticmethod)
    if bound and declared and declared[0].kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD:
        del declared[0]
    parameters: Parameters = {}
    for position, parameter in enumerate(declared):
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            default = None if parameter.default is inspect.Parameter.empty else parameter.default
            parameters[parameter.name] = (sys.maxsize if keyword_only else position, default)
    return parameters


def check_is_coroutine(function: Any) -> None:
    """Raises `TargetMismatch` for a function that does not return a coroutine."""
    if not inspect.iscoroutinefunction(function):
        raise TargetMismatch(getattr(function, "__qualname__", "?"), "is not a coroutine function")


def calls_through(outer: Any, replacement: Any) -> bool:
    """Returns whether a call of `outer` reaches `replacement`, as far as `__wrapped__` attributes show it."""
    for _ in range(100):  # a wrapper may name itself as `__wrapped__`
        if outer is replacement or getattr(outer, "_self_parent", None) is replacement:
            return True
        outer = getattr(outer, "__wrapped__", None)
    return False
