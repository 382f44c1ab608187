"""`POST /dump`: an alert, or anybody on this machine, asks for a tape. One request at a time; what is posted is not kept.

202 names the file, which is there when it is whole. 200: the alert says that it is resolved, and nothing is written.
"""

from __future__ import annotations

import json
from typing import Any

from otel_infer.export import http_server
from otel_infer.sidecar.recording.flight_recorder import WEBHOOK, CannotDump, FlightRecorder

MOST_BYTES = 1 << 20


class Refused(Exception):
    """An HTTP status and what to say with it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Webhook:
    """Serves until it is closed. `address`: `PORT` or `ADDRESS:PORT`; raises `OSError` where it cannot be had."""

    def __init__(self, address: str, recorder: FlightRecorder) -> None:
        self._server = http_server.serve(address, _Handler, recorder, "otel_infer webhook")
        self.port = self._server.server_port

    def close(self) -> None:
        """Lets go of the port."""
        self._server.close()


class _Handler(http_server.Handler):
    def do_POST(self) -> None:
        try:
            self._check()
            if self._is_resolved(self._body()):
                self._say(200, {"file": None, "said": "resolved: nothing is written"})
                return
            self._say(202, {"file": str(self.server.owner.ask(WEBHOOK))})
        except Refused as refusal:
            self._say(refusal.status, {"error": str(refusal)})
        except CannotDump as refusal:
            self._say(503, {"error": str(refusal)})

    def do_GET(self) -> None:
        if self.asked_for() == "/dump":
            self._say(405, {"error": "POST /dump"}, Allow="POST")
        else:
            self._say(404, {"error": "POST /dump"})

    def _check(self) -> None:
        if self.asked_for() != "/dump":
            raise Refused(404, "POST /dump")
        if "Origin" in self.headers:
            raise Refused(403, "not for pages in a browser")
        if "Transfer-Encoding" in self.headers:
            raise Refused(411, "a Content-Length is needed")

    def _body(self) -> bytes:
        said = self.headers.get("Content-Length", "0")
        if not (said.isascii() and said.isdigit()):
            raise Refused(400, "Content-Length is not a number")
        if int(said) > MOST_BYTES:
            raise Refused(413, f"more than {MOST_BYTES} bytes")
        body = self.rfile.read(int(said))
        if len(body) < int(said):
            raise Refused(400, "the body is shorter than its Content-Length")
        return body

    @staticmethod
    def _is_resolved(body: bytes) -> bool:
        try:
            said = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            raise Refused(400, "the body is no JSON") from None
        return isinstance(said, dict) and said.get("status") == "resolved"

    def _say(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        self.answer(status, "application/json", json.dumps(answer).encode() + b"\n", **headers)


for _verb in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
    setattr(_Handler, f"do_{_verb}", _Handler.do_GET)
