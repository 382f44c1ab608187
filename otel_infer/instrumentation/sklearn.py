"""Records `predict` and `predict_proba` of scikit-learn's estimators, XGBoost's and LightGBM's among them.

    Pipeline.predict ─▶ each transform ─ RandomForestClassifier.predict        one stage, of the outermost model

What `fit` predicts is no inference. Read and run: 1.9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.subclass_methods import SubclassMethods
from otel_infer.instrumentation.hooks.suppression import suppress_torch
from otel_infer.instrumentation.model_calls import ModelLibrary, wrap_call
from otel_infer.ringbuffer import events

_REQUESTER = "sklearn.utils._metadata_requests:_MetadataRequester"


def read_model(model: Any) -> str:
    """Returns the class of an estimator, and of a pipeline the class of its last step."""
    steps = getattr(model, "steps", None)
    return type(steps[-1][1] if steps else model).__name__


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of rows of the data: an array, a frame, a list of rows or XGBoost's `DMatrix`; 0 = unknown."""
    data = args[0] if args else next(iter(kwargs.values()), None)
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
_methods = SubclassMethods({"predict": _wrap_predict, "predict_proba": _wrap_predict, "fit": suppress_torch})


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
