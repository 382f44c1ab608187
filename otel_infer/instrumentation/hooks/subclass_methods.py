"""Wraps methods that subclasses define, as each class is defined: where a library has one method in many classes.

    class MyModel(Base): def predict(self, …)  ─▶ Base.__init_subclass__ ─▶ MyModel.predict is wrapped

Classes of `__main__` are left as they are, because cloudpickle pickles them by value, with all that their methods hold.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory


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
                self.wrap_class(cls, hook)

        return init_subclass

    def wrap_subclasses(self, base: type, hook: Hook) -> None:
        """Wraps the methods of all subclasses that exist."""
        known: list[type] = base.__subclasses__()
        for cls in known:
            self.wrap_class(cls, hook)
            self.wrap_subclasses(cls, hook)

    def wrap_class(self, cls: type, hook: Hook) -> None:
        """Wraps the methods that the class itself defines. Never raises."""
        if cls.__module__ == "__main__" or cls in self._wrapped:
            return
        wrapped = self._wrapped[cls] = {}
        for name, make in self._make_by_name.items():
            current = cls.__dict__.get(name)
            if current is None:
                continue
            try:
                replacement = _replace_method(current, make, hook)
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


def _replace_method(current: Any, make: WrapperFactory, hook: Hook) -> Any:
    """Returns the wrapper of a function, or of a descriptor that binds its function `fn` on some conditions."""
    inner = getattr(current, "fn", None)
    if not callable(current) and callable(inner):  # scikit-learn's `available_if`
        condition: Any = current
        return type(current)(
            functools.wraps(inner)(make(inner, hook)), condition.check, condition.attribute_name
        )
    return functools.wraps(current)(make(current, hook))
