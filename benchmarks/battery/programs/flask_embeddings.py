"""Flask under gunicorn with two synchronous workers, of which each serves one request at a time."""

from __future__ import annotations

import logging
import sys
from typing import Any

from flask import Flask, request
from gunicorn.app.base import BaseApplication

from benchmarks.battery.programs import mistakes as made
from benchmarks.battery.programs.encoder import Encoder


def make_app() -> Flask:
    """Returns the application of a worker."""
    mistakes = made.read_mistakes()
    encoder = Encoder(sys.argv[2])
    app = Flask(__name__)

    @app.post("/v1/embeddings")
    def embed_text() -> dict[str, Any]:
        made.check_rate_limit(mistakes)
        made.log_request(mistakes, request.path)
        made.look_up_customer(mistakes)
        made.build_history(mistakes)
        texts = request.get_json()["input"]
        vectors = encoder.encode([texts] if isinstance(texts, str) else texts)
        made.save_transcript(mistakes)
        return {"data": [{"embedding": vector} for vector in vectors]}

    @app.get("/health")
    def report_health() -> str:
        return "ok"

    made.finish_start(mistakes)
    return app


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn with its settings here, as its documentation shows it."""

    def load_config(self) -> None:
        self.cfg.set("bind", f"127.0.0.1:{sys.argv[1]}")
        self.cfg.set("workers", 2)
        self.cfg.set("loglevel", "error")

    def load(self) -> Flask:
        return make_app()


if __name__ == "__main__":
    logging.basicConfig()
    Server().run()
