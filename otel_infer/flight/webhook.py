"""`POST /dump`: an alert, or anybody on this machine, asks for a tape. One request at a time; what is posted is not kept.

202 names the file, which is there when it is whole. 200: the alert says that it is resolved, and nothing is written.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET6
from typing import Any

from otel_infer.flight.dumps import WEBHOOK, CannotDump, FlightRecorder

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MOST_BYTES = 1 << 20
CLIENT_S = 5.0


class Refused(Exception):
    """An HTTP status and what to say with it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Webhook:
    """Serves until it is closed. `address`: `PORT` or `ADDRESS:PORT`; raises `OSError` where it cannot be had."""

    def __init__(self, address: str, recorder: FlightRecorder) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or LOOPBACK
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, int(port)), recorder)
        self.port: int = self._server.server_address[1]
        thread = threading.Thread(
            target=self._server.serve_forever, args=(0.5,), name="otel_infer webhook", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Lets go of the port."""
        self._server.shutdown()
        self._server.server_close()


class _Server(HTTPServer):
    def __init__(self, address: tuple[str, int], recorder: FlightRecorder) -> None:
        self.recorder = recorder
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of our own name, which may take long."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is no news."""
        log.debug("a request to the webhook broke", exc_info=True)


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S
    server_version = "otel_infer"
    sys_version = ""

    def do_POST(self) -> None:
        try:
            self._check()
            if self._is_resolved(self._body()):
                self._say(200, {"file": None, "said": "resolved: nothing is written"})
                return
            self._say(202, {"file": str(self.server.recorder.ask(WEBHOOK))})
        except Refused as refusal:
            self._say(refusal.status, {"error": str(refusal)})
        except CannotDump as refusal:
            self._say(503, {"error": str(refusal)})

    def do_GET(self) -> None:
        self._say(405 if self._path() == "/dump" else 404, {"error": "POST /dump"})

    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _check(self) -> None:
        if self._path() != "/dump":
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

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode() + b"\n"
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 405:
            self.send_header("Allow", "POST")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: what is asked of us is not for a log."""


for _verb in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
    setattr(_Handler, f"do_{_verb}", _Handler.do_GET)
