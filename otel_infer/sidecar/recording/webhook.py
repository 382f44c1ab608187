"""`POST /dump`: an alert, or anybody on this machine, asks for a tape. One request at a time; what is posted is not kept.

202 names the file, which is there when it is whole. 200: the alert says that it is resolved, and nothing is written.
"""

from __future__ import annotations

import json
from typing import Any

from otel_infer.export import http_server
from otel_infer.sidecar.recording.flight_recorder import WEBHOOK, DumpRejected, FlightRecorder

MAX_BODY_BYTES = 1 << 20


class WebhookError(Exception):
    """An HTTP status and what to say with it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Webhook:
    """Serves until it is closed. `address`: `PORT` or `ADDRESS:PORT`; raises `OSError` where it cannot be had."""

    def __init__(self, address: str, recorder: FlightRecorder) -> None:
        self._server = http_server.start_server(address, _WebhookHandler, recorder, "otel_infer webhook")
        self.port = self._server.server_port

    def close(self) -> None:
        """Lets go of the port."""
        self._server.close()


class _WebhookHandler(http_server.HttpHandler):
    def do_POST(self) -> None:
        try:
            self._check_request()
            if self._is_resolved(self._read_body()):
                self._send_json(200, {"file": None, "said": "resolved: nothing is written"})
                return
            self._send_json(202, {"file": str(self.server.owner.request_dump(WEBHOOK))})
        except WebhookError as refusal:
            self._send_json(refusal.status, {"error": str(refusal)})
        except DumpRejected as refusal:
            self._send_json(503, {"error": str(refusal)})

    def do_GET(self) -> None:
        if self.path_without_query() == "/dump":
            self._send_json(405, {"error": "POST /dump"}, Allow="POST")
        else:
            self._send_json(404, {"error": "POST /dump"})

    def _check_request(self) -> None:
        if self.path_without_query() != "/dump":
            raise WebhookError(404, "POST /dump")
        if "Origin" in self.headers:
            raise WebhookError(403, "not for pages in a browser")
        if "Transfer-Encoding" in self.headers:
            raise WebhookError(411, "a Content-Length is needed")

    def _read_body(self) -> bytes:
        said = self.headers.get("Content-Length", "0")
        if not (said.isascii() and said.isdigit()):
            raise WebhookError(400, "Content-Length is not a number")
        if int(said) > MAX_BODY_BYTES:
            raise WebhookError(413, f"more than {MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(said))
        if len(body) < int(said):
            raise WebhookError(400, "the body is shorter than its Content-Length")
        return body

    @staticmethod
    def _is_resolved(body: bytes) -> bool:
        try:
            said = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            raise WebhookError(400, "the body is no JSON") from None
        return isinstance(said, dict) and said.get("status") == "resolved"

    def _send_json(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        self.send_content(status, "application/json", json.dumps(answer).encode() + b"\n", **headers)


for _verb in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
    setattr(_WebhookHandler, f"do_{_verb}", _WebhookHandler.do_GET)
