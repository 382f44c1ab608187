"""Flask and a small classifier, under gunicorn."""

from __future__ import annotations

from flask import Flask, request

from benchmarks.whole.programs.bert import classify_texts

app = Flask(__name__)


@app.post("/classify")
def classify_text() -> dict[str, int]:
    """Returns the class of a text."""
    return {"label": classify_texts([request.get_json()["text"]])[0]}


@app.get("/health")
def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"
