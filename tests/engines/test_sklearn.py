"""scikit-learn, XGBoost and LightGBM: the outermost `predict` is one stage, whatever it calls."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.instrumentation import lightgbm as lightgbm_hooks
from otel_infer.instrumentation import sklearn as hooks
from otel_infer.instrumentation import xgboost as xgboost_hooks
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from tests.engines.conftest import Serve, describe
from tests.support.rings import Recording, stages_of

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
ROWS = np.random.default_rng(0).normal(size=(40, 4))
LABELS = (ROWS[:, 0] > 0).astype(int)
INSTRUMENTORS = hooks.instrumentor, xgboost_hooks.instrumentor, lightgbm_hooks.instrumentor


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    import lightgbm
    import sklearn.base
    import xgboost

    assert sklearn.base and xgboost and lightgbm
    for instrumentor in INSTRUMENTORS:
        instrumentor.install()
        assert instrumentor.status.state == "active", instrumentor.status.drift
    yield
    for instrumentor in reversed(INSTRUMENTORS):
        instrumentor.remove()


def make_forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(n_estimators=4, random_state=0)


def make_pipeline() -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), make_forest())


def make_search() -> Any:
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    return GridSearchCV(SVC(), {"C": [1, 2]}, cv=2)


def make_xgboost() -> Any:
    from xgboost import XGBClassifier

    return XGBClassifier(n_estimators=2)


def make_lightgbm() -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=2, verbose=-1)


def make_regression() -> Any:
    """Its `predict` is that of a mixin, which is no estimator itself."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression()


MODELS = {
    "regression": (make_regression, "scikit-learn", "LogisticRegression"),
    "forest": (make_forest, "scikit-learn", "RandomForestClassifier"),
    "pipeline": (make_pipeline, "scikit-learn", "RandomForestClassifier"),
    "search": (make_search, "scikit-learn", "GridSearchCV"),
    "xgboost": (make_xgboost, "xgboost", "XGBClassifier"),
    "lightgbm": (make_lightgbm, "lightgbm", "LGBMClassifier"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_is_one_stage_and_training_is_none(
    name: str, recording: Recording, serve: Serve
) -> None:
    make, provider, model = MODELS[name]
    fitted = make().fit(ROWS, LABELS)
    assert recording.records() == []
    with serve():
        expected = fitted.predict(ROWS[:3])
    (record,) = recording.records()
    assert (stages_of(record), describe(record)) == (["ingress", "forward"], ("inference", provider, model))
    assert record.stages[1].attributes[semconv.ITEMS] == len(expected) == 3


def test_probabilities_are_an_inference(recording: Recording) -> None:
    make_forest().fit(ROWS, LABELS).predict_proba(ROWS[:2])
    (record,) = recording.records()
    assert (record.name, stages_of(record)) == ("inference RandomForestClassifier", ["forward"])


def test_a_booster_is_one_stage(recording: Recording) -> None:
    import lightgbm
    import xgboost

    booster = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(ROWS, LABELS), 2)
    booster.predict(xgboost.DMatrix(ROWS[:5]))
    lightgbm.train({"verbose": -1}, lightgbm.Dataset(ROWS, LABELS), 2).predict(ROWS[:5])
    first, second = recording.records()
    assert (describe(first), describe(second)) == (
        ("inference", "xgboost", "Booster"), ("inference", "lightgbm", "Booster"),
    )  # fmt: skip
    assert [record.stages[0].attributes[semconv.ITEMS] for record in (first, second)] == [5, 5]


def test_a_failed_prediction_keeps_its_exception(recording: Recording) -> None:
    with pytest.raises(Exception, match="not fitted") as raised:
        make_forest().predict(ROWS)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_a_class_that_is_defined_later_is_followed(recording: Recording) -> None:
    from sklearn.base import BaseEstimator

    class Constant(BaseEstimator):  # type: ignore[misc]
        def predict(self, data: Any) -> Any:
            return [1] * len(data)

    Constant().predict([[1.0], [2.0]])
    (record,) = recording.records()
    assert (record.model, record.stages[0].attributes[semconv.ITEMS]) == ("Constant", 2)


class UnknownRows:
    """Data whose number of rows is unknown, as that of a lazy array."""

    shape = (float("nan"), 4)


def test_data_and_parameters_of_any_kind_are_followed(recording: Recording) -> None:
    from sklearn.base import BaseEstimator

    class Steps(BaseEstimator):  # type: ignore[misc]
        steps = 10

        def predict(self, data: Any) -> str:
            return "predicted"

    assert [Steps().predict(UnknownRows()), Steps().predict(ROWS)] == ["predicted"] * 2
    first, second = recording.records()
    assert (first.model, stages_of(first), first.outcome) == ("Steps", ["forward"], events.OK)
    assert semconv.ITEMS not in first.stages[0].attributes
    assert second.stages[0].attributes[semconv.ITEMS] == len(ROWS)


def define_methods() -> list[type]:
    """Returns estimators whose `predict` is no method that returns when its work is done."""
    from sklearn.base import BaseEstimator

    class Static(BaseEstimator):  # type: ignore[misc]
        @staticmethod
        def predict(data: Any) -> list[Any]:
            return list(data)

    class OfClass(BaseEstimator):  # type: ignore[misc]
        @classmethod
        def predict(cls, data: Any) -> list[Any]:
            return list(data)

    class Computed(BaseEstimator):  # type: ignore[misc]
        @property
        def predict(self) -> Any:
            return list

    class Partial(BaseEstimator):  # type: ignore[misc]
        def _predict(self, kind: Any, data: Any) -> Any:
            return kind(data)

        predict = functools.partialmethod(_predict, list)

    class Generated(BaseEstimator):  # type: ignore[misc]
        def predict(self, data: Any) -> Any:
            yield from data

    return [Static, OfClass, Computed, Partial, Generated]


def test_methods_of_other_kinds_work_as_before(recording: Recording) -> None:
    assert [list(cls().predict([1, 2])) for cls in define_methods()] == [[1, 2]] * 5
    assert recording.records() == []


def define_estimator() -> type:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.metaestimators import available_if

    class Local(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def fit(self, data: Any, labels: Any) -> Any:
            self.classes_ = np.unique(labels)
            return self

        @available_if(lambda self: True)
        def predict(self, data: Any) -> Any:
            return np.full(len(data), self.classes_[0])

    return Local


def test_an_estimator_of_a_function_is_trained_in_other_processes(recording: Recording) -> None:
    """cloudpickle pickles such a class by value, with all that its methods hold."""
    import cloudpickle
    from sklearn.model_selection import cross_val_score

    estimator = define_estimator()().fit(ROWS, LABELS)
    expected = estimator.predict(ROWS).tolist()
    assert len(cross_val_score(estimator, ROWS, LABELS, cv=2, n_jobs=2)) == 2
    assert cloudpickle.loads(cloudpickle.dumps(estimator)).predict(ROWS).tolist() == expected
    assert [record.model for record in recording.records()] == ["Local"]


def test_a_decorated_method_keeps_what_its_decorator_added(recording: Recording) -> None:
    from sklearn.base import BaseEstimator

    class Cached(BaseEstimator):  # type: ignore[misc]
        @functools.lru_cache(2)  # noqa: B019
        def predict(self, rows: int) -> int:
            return rows

    estimator = Cached()
    assert [estimator.predict(3), estimator.predict(3)] == [3, 3]
    assert Cached.predict.cache_info().hits == 1
    assert len(recording.records()) == 2


def test_what_an_imputer_is_trained_with_is_no_inference(recording: Recording) -> None:
    from sklearn.experimental import enable_iterative_imputer
    from sklearn.impute import IterativeImputer

    assert enable_iterative_imputer
    assert IterativeImputer(max_iter=2).fit_transform(np.where(ROWS > 2, np.nan, ROWS)).shape == ROWS.shape
    assert recording.records() == []


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_training_in_parallel_is_no_inference(backend: str, recording: Recording) -> None:
    import joblib
    from sklearn.model_selection import GridSearchCV

    with joblib.parallel_config(backend=backend):
        GridSearchCV(make_forest(), {"max_depth": [1, 2]}, cv=2, n_jobs=2).fit(ROWS, LABELS)
    assert recording.records() == []


def test_tasks_of_a_training_are_marked_for_other_processes() -> None:
    from sklearn.utils.parallel import Parallel, delayed

    def read_marks() -> list[bool]:
        tasks = [delayed(len)([])]
        Parallel()(tasks)
        return [hasattr(task[0], hooks.PART) for task in tasks]

    assert read_marks() == [False]
    token = torch_suppressed.set(True)
    try:
        assert read_marks() == [True]
    finally:
        torch_suppressed.reset(token)


def test_what_training_predicts_for_its_objective_is_no_inference(recording: Recording) -> None:
    import xgboost

    def objective(margin: Any, data: Any) -> Any:
        return margin - data.get_label(), np.ones(len(LABELS))

    data = xgboost.DMatrix(ROWS, LABELS)
    metric = {"custom_metric": lambda margin, data: ("zero", 0.0), "evals": [(data, "train")]}
    xgboost.train({}, data, 2, obj=objective, verbose_eval=False, **metric)
    assert recording.records() == []


def test_models_pickle_and_check_their_methods_as_before(recording: Recording) -> None:
    from sklearn.svm import SVC

    assert not hasattr(SVC(probability=False), "predict_proba")
    fitted = pickle.loads(pickle.dumps(make_pipeline().fit(ROWS, LABELS)))
    assert fitted.predict(ROWS[:2]).tolist() == LABELS[:2].tolist()


def test_hooks_that_are_removed_leave_the_classes_as_they_were() -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import Pipeline

    hooks.instrumentor.remove()
    before = RandomForestClassifier.__mro__[1].__dict__["predict"], Pipeline.__dict__["predict"]
    hooks.instrumentor.install()
    assert RandomForestClassifier.__mro__[1].__dict__["predict"] is not before[0]
    hooks.instrumentor.remove()
    assert (RandomForestClassifier.__mro__[1].__dict__["predict"], Pipeline.__dict__["predict"]) == before
