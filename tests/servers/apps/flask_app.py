"""Flask. `python -m tests.servers.apps.flask_app PORT` serves it by werkzeug; gunicorn and waitress load `app`."""

from __future__ import annotations

import sys

from flask import Flask, Response, jsonify

from tests.servers.apps.scorer import PAUSE_S, score, stream

app = Flask(__name__)


@app.post("/classify/<name>")
def classify(name: str) -> Response:
    return jsonify(score())


@app.get("/score/<name>")
def show_score(name: str) -> Response:
    return jsonify(score())


@app.post("/stream")
def stream_scores() -> Response:
    return Response(stream())


@app.post("/slow")
def stream_slowly() -> Response:
    return Response(stream(PAUSE_S))


@app.post("/fail")
def fail() -> Response:
    raise RuntimeError("canary")


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]), threaded=True)
