"""Records `predict` and `predict_proba` of scikit-learn's estimators, XGBoost's and LightGBM's among them.

    Pipeline.predict ─▶ each transform ─ RandomForestClassifier.predict        one stage, of the outermost model

What `fit` predicts is no inference, nor is it in the threads and processes of `n_jobs`. Read and run: 1.9.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.subclass_methods import SubclassMethods
from otel_infer.instrumentation.hooks.suppression import suppress_torch, torch_suppressed
from otel_infer.instrumentation.model_calls import ModelLibrary, guard_rows, wrap_call
from otel_infer.ringbuffer import events

PART = "otel_infer_part"
"""The attribute of a parallel task that is a part of another call."""
_REQUESTER = "sklearn.utils._metadata_requests:_MetadataRequester"


def read_model(model: Any) -> str:
    """Returns the class of an estimator, and of a pipeline the class of its last step."""
    steps = getattr(model, "steps", None)
    last = steps[-1] if isinstance(steps, list) and steps else None
    return type(last[1] if isinstance(last, tuple) else model).__name__


@guard_rows
def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of rows of the data: an array, a frame, a list of rows or XGBoost's `DMatrix`; 0 = unknown."""
    data = args[0] if args else kwargs.get("X", kwargs.get("data"))
    counted = getattr(data, "num_row", None)
    if callable(counted):
        return int(counted())
    shape = getattr(data, "shape", None)
    return int(shape[0]) if shape else len(data) if isinstance(data, list) else 0


LIBRARIES = {
    name: ModelLibrary(provider, read_model)
    for name, provider in (
        ("sklearn", events.SCIKIT_LEARN), ("xgboost", events.XGBOOST), ("lightgbm", events.LIGHTGBM),
    )
}  # fmt: skip
"""By the first part of the module of a model's class."""


def _find_library(model: Any) -> ModelLibrary:
    return LIBRARIES.get(type(model).__module__.partition(".")[0], LIBRARIES["sklearn"])


_wrap_predict = wrap_call(_find_library, count_rows)
_methods = SubclassMethods(
    {
        "predict": _wrap_predict,
        "predict_proba": _wrap_predict,
        "fit": suppress_torch,
        "fit_predict": suppress_torch,
        "fit_transform": suppress_torch,
        "partial_fit": suppress_torch,
    }
)


class _SklearnInstrumentor(Instrumentor):
    """The instrumentor of scikit-learn, which also restores the methods of the estimators."""

    def remove(self) -> None:
        super().remove()
        _methods.unwrap_classes()


instrumentor = _SklearnInstrumentor("sklearn", "scikit-learn", ("sklearn",), is_engine=True)


@instrumentor.patch_hot_path(f"{_REQUESTER}.__init_subclass__")
def _patch_init_subclass(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    _methods.wrap_subclasses(sys.modules["sklearn.utils._metadata_requests"]._MetadataRequester, hook)
    return _methods.patch_init_subclass(original, hook)


@instrumentor.patch_hot_path("sklearn.utils.parallel:Parallel.__call__", optional=True, part="parallel")
def _patch_parallel(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Marks the tasks that are parts of a call, because they may run in other threads and processes."""

    def run_in_parallel(self: Any, iterable: Any) -> Any:
        is_part = hook.alive and torch_suppressed.get()
        return original(self, (_mark_part(task) for task in iterable) if is_part else iterable)

    return run_in_parallel


def _mark_part(task: Any) -> Any:
    with contextlib.suppress(Exception):  # a function that takes no attributes
        setattr(task[0], PART, True)
    return task


@instrumentor.patch_hot_path("sklearn.utils.parallel:_FuncWrapper.__call__", optional=True, part="parallel")
def _patch_task(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    run_as_part = suppress_torch(original, hook)

    def run_task(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (run_as_part if PART in self.__dict__ else original)(self, *args, **kwargs)

    return run_task
