"""Wraps methods that subclasses define, as each class is defined: where a library has one method in many classes.

    class MyModel(Base): def predict(self, …)  ─▶ Base.__init_subclass__ ─▶ MyModel.predict is wrapped

A mixin that is no subclass itself is wrapped with the first subclass that inherits from it.
A wrapped method is pickled as the method itself, also by cloudpickle, which pickles some classes by value.
Methods that do not end where they return (generators, coroutines) are left as they are, as is what is no method of an object.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, ProbeWrapper, WrapperFactory


class SubclassMethods:
    """The wrapped methods of the subclasses of one class. `make_by_name`: the factory for each method's wrapper."""

    def __init__(self, make_by_name: Mapping[str, WrapperFactory]) -> None:
        self._make_by_name = make_by_name
        self._wrapped: weakref.WeakKeyDictionary[type, dict[str, tuple[Any, Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def patch_init_subclass(self, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        """Returns the class's `__init_subclass__`, which wraps the methods of the new class. A factory for a hot path."""

        def init_subclass(cls: type, **kwargs: Any) -> None:
            original(cls, **kwargs)
            if hook.alive:
                self.wrap_class_and_bases(cls, hook)

        return init_subclass

    def wrap_subclasses(self, base: type, hook: Hook) -> None:
        """Wraps the methods of all subclasses that exist."""
        known: list[type] = base.__subclasses__()
        for cls in known:
            self.wrap_class_and_bases(cls, hook)
            self.wrap_subclasses(cls, hook)

    def wrap_class_and_bases(self, cls: type, hook: Hook) -> None:
        """Wraps the methods of the class and of all that it inherits from. Never raises."""
        for base in cls.__mro__:
            if base not in self._wrapped and base.__module__ != "builtins":
                self.wrap_class(base, hook)

    def wrap_class(self, cls: type, hook: Hook) -> None:
        """Wraps the methods that the class itself defines. Never raises."""
        if cls in self._wrapped:
            return
        wrapped = self._wrapped[cls] = {}
        for name, make in self._make_by_name.items():
            current = cls.__dict__.get(name)
            if current is None:
                continue
            try:
                replacement = _replace_method(current, make, hook, cls)
                if replacement is not None:
                    setattr(cls, name, replacement)
                    wrapped[name] = current, replacement
            except Exception as exc:
                hook.count_failure(exc)

    def unwrap_classes(self) -> None:
        """Restores the methods that nobody else has replaced since."""
        for cls, methods in list(self._wrapped.items()):
            for name, (original, replacement) in methods.items():
                if cls.__dict__.get(name) is replacement:
                    setattr(cls, name, original)
        self._wrapped.clear()


def _replace_method(current: Any, make: WrapperFactory, hook: Hook, owner: type) -> Any:
    """Returns the wrapper of a method, or of a descriptor that binds its function `fn` on some conditions.

    None for what is left as it is, such as a static method, a property or a generator.
    """
    inner: Any = getattr(current, "fn", None)
    is_conditional = not callable(current) and callable(inner) and hasattr(current, "check")
    if is_conditional:  # scikit-learn's `available_if`
        return type(current)(_wrap_method(inner, make, hook, owner), current.check, current.attribute_name)
    if not _is_method(current) or _ends_later(current):
        return None
    return _wrap_method(current, make, hook, owner)


def _wrap_method(method: Any, make: WrapperFactory, hook: Hook, owner: type) -> ProbeWrapper:
    call = make(method, hook)

    def call_method(_: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs) if instance is None else call(instance, *args, **kwargs)

    wrapper = ProbeWrapper(method, call_method)
    wrapper._self_home = owner
    return wrapper


def _is_method(attribute: Any) -> bool:
    """Returns whether an attribute of a class is called with the object first."""
    return (
        callable(attribute)
        and hasattr(type(attribute), "__get__")
        and not isinstance(attribute, (staticmethod, classmethod))
    )


def _ends_later(function: Any) -> bool:
    """Returns whether a function returns before its work has ended."""
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_kind(function) for is_kind in kinds)
