"""Gradio: a classifier, one that works on batches, and a stream. `python -m tests.servers.apps.gradio_app PORT`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import gradio as gr
import torch

from tests.servers.apps.scorer import score, scorer


def classify(value: float) -> float:
    if value < 0:
        raise ValueError("no rows")
    return float(score(1)[0][0]) * value


def classify_batch(values: list[float]) -> tuple[list[float]]:
    with torch.inference_mode():
        return (scorer(torch.ones(len(values), 16)).sum(dim=1).tolist(),)


def stream(value: float) -> Iterator[float]:
    for _ in range(3):
        yield classify(value)


def build() -> Any:
    with gr.Blocks() as blocks:
        given, found = gr.Number(), gr.Number()
        for function, options in (
            (classify, {}),
            (classify_batch, {"batch": True, "max_batch_size": 4}),
            (stream, {}),
        ):
            gr.Button(function.__name__).click(function, given, found, api_name=function.__name__, **options)
    return blocks.queue()


if __name__ == "__main__":
    build().launch(server_port=int(sys.argv[1]), quiet=True)
