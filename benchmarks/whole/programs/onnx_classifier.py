"""FastAPI and ONNX Runtime: a classifier of texts, the mean of its tokens' embeddings through some layers.

MODEL names the folder of its tokenizer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

WIDTH, LAYERS, CLASSES = 64, 6, 2

app = FastAPI()
tokenizer = Tokenizer.from_file(os.path.join(os.environ["MODEL"], "tokenizer.json"))


def make_model(words: int) -> bytes:
    """Returns a model with random weights."""
    draw = np.random.default_rng(0)
    shapes = {"table": (words, WIDTH), "head": (WIDTH, CLASSES)} | {
        f"weights{i}": (WIDTH, WIDTH) for i in range(LAYERS)
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded"], ["values0"], axes=[1], keepdims=0),
    ]
    for i in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"values{i}", f"weights{i}"], [f"product{i}"]))
        nodes.append(helper.make_node("Relu", [f"product{i}"], [f"values{i + 1}"]))
    nodes.append(helper.make_node("MatMul", [f"values{LAYERS}", "head"], ["scores"]))
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["texts", "tokens"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["texts", CLASSES])],
        [
            numpy_helper.from_array(draw.normal(size=shape).astype("float32"), name)
            for name, shape in shapes.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 10
    written: bytes = model.SerializeToString()
    return written


options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(make_model(tokenizer.get_vocab_size()), options)


@app.post("/classify")
async def classify_text(body: dict[str, Any]) -> dict[str, int]:
    """Returns the class of a text."""
    ids = np.array([tokenizer.encode(body["text"]).ids], dtype="int64")
    (scores,) = session.run(["scores"], {"ids": ids})
    return {"label": int(scores.argmax())}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
