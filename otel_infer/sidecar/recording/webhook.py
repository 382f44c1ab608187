"""Serves `POST /dump`: an alert, or any process on this machine, requests a tape.

202 names the file, which appears when it is complete. 200: nothing is written, because the alert is resolved,
or is about another server. The request's body is not stored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from otel_infer.export import http_server
from otel_infer.ringbuffer.events import Value
from otel_infer.sidecar.recording import alert_target
from otel_infer.sidecar.recording.flight_recorder import WEBHOOK, DumpRejected, FlightRecorder

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20


class WebhookError(Exception):
    """HTTP status and message of a rejected request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Webhook:
    """HTTP server that runs until it is closed. `address`: `PORT` or `ADDRESS:PORT`.

    `resource`: the resource of metrics over OTLP; empty if Prometheus gives the server labels of its own.
    Raises `OSError` where the address cannot be bound.
    """

    def __init__(self, address: str, recorder: FlightRecorder, resource: Mapping[str, Value]) -> None:
        self._recorder, self._resource = recorder, resource
        self._has_ignored = False
        self._server = http_server.start_server(address, _WebhookHandler, self, "otel_infer webhook")
        self.port = self._server.server_port

    def process_notification(self, body: bytes, path: str) -> tuple[int, dict[str, Any]]:
        """Requests a tape, unless the alert needs none; returns status and answer.

        Raises `WebhookError` or `DumpRejected`.
        """
        try:
            notification = json.loads(body) if body.strip() else {}
            own = alert_target.replace_labels(alert_target.find_own_labels(self._resource), path)
            is_addressed = alert_target.is_addressed(notification, own)
        except (ValueError, RecursionError):
            raise WebhookError(400, "the body is not valid JSON") from None
        if isinstance(notification, dict) and notification.get("status") == "resolved":
            return 200, {"file": None, "message": "the alert is resolved; no tape is written"}
        if not is_addressed:
            return 200, {"file": None, "message": self._describe_ignored(own)}
        return 202, {"file": str(self._recorder.request_dump(WEBHOOK))}

    def _describe_ignored(self, own: Mapping[str, str]) -> str:
        hint = "no tape is written; if Prometheus names this server otherwise, add ?job=NAME to the webhook's address"
        if not self._has_ignored:
            self._has_ignored = True
            log.warning("an alert is about another server: %s", hint)
        named = ", ".join(f"{label} {value}" for label, value in own.items())
        return f"the alert is not about {named}: {hint}"

    def close(self) -> None:
        """Releases the port."""
        self._server.close()


class _WebhookHandler(http_server.HttpHandler):
    def do_POST(self) -> None:
        try:
            self._check_request()
            self._send_json(*self.server.owner.process_notification(self._read_body(), self.path))
        except WebhookError as rejection:
            self._send_json(rejection.status, {"error": str(rejection)})
        except DumpRejected as rejection:
            self._send_json(503, {"error": str(rejection)})

    def do_GET(self) -> None:
        if self.path_without_query() == "/dump":
            self._send_json(405, {"error": "POST /dump"}, Allow="POST")
        else:
            self._send_json(404, {"error": "POST /dump"})

    def _check_request(self) -> None:
        if self.path_without_query() != "/dump":
            raise WebhookError(404, "POST /dump")
        if "Origin" in self.headers:
            raise WebhookError(403, "requests from pages in a browser are not allowed")
        if "Transfer-Encoding" in self.headers:
            raise WebhookError(411, "a Content-Length header is required")

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            raise WebhookError(400, "Content-Length is not a number")
        if int(length) > MAX_BODY_BYTES:
            raise WebhookError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise WebhookError(400, "the body is shorter than its Content-Length")
        return body

    def _send_json(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        self.send_content(status, "application/json", json.dumps(answer).encode() + b"\n", **headers)


for _verb in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
    setattr(_WebhookHandler, f"do_{_verb}", _WebhookHandler.do_GET)
