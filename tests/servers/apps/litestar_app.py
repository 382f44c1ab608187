"""Litestar, served by uvicorn."""

from __future__ import annotations

from litestar import Litestar, get, post
from litestar.response import Stream

from tests.servers.apps.scorer import PAUSE_S, score, stream


@post("/classify/{name:str}", sync_to_thread=True, status_code=200)
def classify(name: str) -> list[list[float]]:
    return score()


@get("/score/{name:str}", sync_to_thread=True)
def show_score(name: str) -> list[list[float]]:
    return score()


@post("/stream", sync_to_thread=False)
def stream_scores() -> Stream:
    return Stream(stream())


@post("/slow", sync_to_thread=False)
def stream_slowly() -> Stream:
    return Stream(stream(PAUSE_S))


@post("/fail", sync_to_thread=False)
def fail() -> None:
    raise RuntimeError("canary")


@get("/health", sync_to_thread=False)
def report_health() -> str:
    return "ok"


app = Litestar([classify, show_score, stream_scores, stream_slowly, fail, report_health])
