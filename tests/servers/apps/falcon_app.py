"""Falcon, served by wsgiref, with a thread per request."""

from __future__ import annotations

import sys
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

import falcon

from tests.servers.apps.scorer import PAUSE_S, score, stream


class Classify:
    def on_post(self, request: Any, response: Any, name: str) -> None:
        response.media = score()


class Score:
    def on_get(self, request: Any, response: Any, name: str) -> None:
        response.media = score()


class Stream:
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_post(self, request: Any, response: Any) -> None:
        response.stream = stream(self.pause_s)


class Fail:
    def on_post(self, request: Any, response: Any) -> None:
        raise RuntimeError("canary")


class Health:
    def on_get(self, request: Any, response: Any) -> None:
        response.text = "ok"


class ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


app = falcon.App()
for path, resource in (
    ("/classify/{name}", Classify()),
    ("/score/{name}", Score()),
    ("/stream", Stream(0)),
    ("/slow", Stream(PAUSE_S)),
    ("/fail", Fail()),
    ("/health", Health()),
):
    app.add_route(path, resource)

if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), app, server_class=ThreadingServer).serve_forever()
