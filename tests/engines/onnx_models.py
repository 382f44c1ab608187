"""A tiny ONNX model, made locally: a classifier of rows of 16 numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

COLUMNS, CLASSES = 16, 4


def make_classifier(path: Path) -> Path:
    """Writes the model; returns its path."""
    weights = np.random.default_rng(0).normal(size=(COLUMNS, CLASSES)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["rows", "weights"], ["scores"])],
        "classifier",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", COLUMNS])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 10
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def make_rows(count: int) -> np.ndarray:
    """Returns rows for the model."""
    return np.ones((count, COLUMNS), dtype="float32")
