"""Records predictions of LightGBM's `Booster`. Its estimators are scikit-learn's, whose instrumentation records them.

Read and run: 4.7.
"""

from __future__ import annotations

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.model_calls import wrap_call
from otel_infer.instrumentation.sklearn import LIBRARIES, count_rows

instrumentor = Instrumentor("lightgbm", "lightgbm", ("lightgbm",), is_engine=True)

instrumentor.patch_hot_path("lightgbm.basic:Booster.predict", reads=("data",))(
    wrap_call(LIBRARIES["lightgbm"], count_rows)
)
