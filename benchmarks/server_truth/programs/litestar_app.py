"""Litestar, with the model in a thread. It reads annotations at run time, so they must not be strings."""

from typing import Any

from litestar import Litestar, post

from benchmarks.server_truth.programs.work import classify, finish


@post("/classify", sync_to_thread=True, status_code=200)
def classify_text(data: dict[str, Any]) -> dict[str, Any]:
    return finish(classify())


app = Litestar([classify_text])
