"""TODO instrumentation.hooks.target."""

from __future__ import annotations

import inspect
import sys
from typing import Any


class TargetMismatch(Exception):
    """The library no longer looks the way its integration was written for."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)  # both, so that it pickles
        self.target = target
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


Parameters = dict[str, tuple[int, Any]]
"""By name: the position (sys.maxsize if it has none) and the default (None if it has none)."""


def resolve_target(module: str, path: str) -> tuple[Any, str, Any]:
    """Owner, name, what it holds; runs nobody's code. Raises LookupError with what is missing."""
    owner = sys.modules.get(module)
    if owner is None:
        raise LookupError(f"module {module} imported")
    *outer, name = path.split(".")
    for step in outer:
        owner = _lookup_attribute(owner, step)
    return owner, name, _lookup_attribute(owner, name)


def _lookup_attribute(owner: Any, name: str) -> Any:
    for home in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in getattr(home, "__dict__", ()):
            return home.__dict__[name]
    raise LookupError(name)


def _read_parameters(owner: Any, current: Any) -> Parameters:
    """What a caller may name, without `self` or `cls`; empty if the signature cannot be read."""
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
            named_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            default = None if parameter.default is inspect.Parameter.empty else parameter.default
            parameters[parameter.name] = (sys.maxsize if named_only else position, default)
    return parameters


def _calls_through(outer: Any, ours: Any) -> bool:
    """Whether calling `outer` still comes through `ours`, as far as wrappers tell."""
    for _ in range(100):  # a wrapper may say that it wraps itself
        if outer is ours or getattr(outer, "_self_parent", None) is ours:
            return True
        outer = getattr(outer, "__wrapped__", None)
    return False
