"""Records predictions of XGBoost's `Booster`. Its estimators are scikit-learn's, whose instrumentation records them.

What training predicts for its objective and its metrics is no inference. Read and run: 3.2.
"""

from __future__ import annotations

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.suppression import suppress_torch
from otel_infer.instrumentation.model_calls import wrap_call
from otel_infer.instrumentation.sklearn import LIBRARIES, count_rows

instrumentor = Instrumentor("xgboost", "xgboost", ("xgboost",), is_engine=True)

for _name in ("predict", "inplace_predict"):
    instrumentor.patch_hot_path(f"xgboost.core:Booster.{_name}", reads=("data",))(
        wrap_call(LIBRARIES["xgboost"], count_rows)
    )
for _name in ("update", "boost", "eval_set"):
    instrumentor.patch_hot_path(f"xgboost.core:Booster.{_name}")(suppress_torch)
