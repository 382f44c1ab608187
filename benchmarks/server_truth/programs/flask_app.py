"""Flask, for any WSGI server; `python -m benchmarks.server_truth.programs.flask_app PORT` is Flask's own."""

from __future__ import annotations

import sys
from typing import Any

from flask import Flask

from benchmarks.server_truth.programs.work import classify, finish

app = Flask(__name__)


@app.post("/classify")
def classify_text() -> dict[str, Any]:
    return finish(classify())


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]), threaded=True)
