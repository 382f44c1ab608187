"""The small HTTP servers beside a server: one request at a time, on loopback unless told otherwise."""

from __future__ import annotations

import io
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CLIENT_TIMEOUT_S, CLOSE_TIMEOUT_S = 5.0, 1.0


class BackgroundServer(HTTPServer):
    """Serves in a thread of its own until it is closed. `owner` is whom the handlers serve for."""

    def __init__(self, address: tuple[str, int], handler: type[HttpHandler], owner: Any) -> None:
        self.owner = owner
        super().__init__(address, handler)

    def start(self, name: str) -> None:
        """Begins to answer."""
        threading.Thread(target=self.serve_forever, args=(0.5,), name=name, daemon=True).start()

    def close(self) -> None:
        """Lets go of the port; whoever is being answered is waited for no longer than `CLOSE_S`."""
        stopping = threading.Thread(target=self.shutdown, daemon=True)
        stopping.start()
        stopping.join(CLOSE_TIMEOUT_S)
        self.server_close()

    def server_bind(self) -> None:
        """Without the look-up of our own name, which may take long; at once again after a restart."""
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up is no news."""
        log.debug("a request to %s broke", self.server_port, exc_info=True)


class _Ipv6BackgroundServer(BackgroundServer):
    address_family = AF_INET6


class _DeadlineReader(io.RawIOBase):
    """What comes from a connection within so many seconds; raises `TimeoutError` then."""

    def __init__(self, connection: socket, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class HttpHandler(BaseHTTPRequestHandler):
    """Answers in one piece and says nothing of who it is, nor to a log of who asked."""

    server: BackgroundServer
    timeout = CLIENT_TIMEOUT_S
    server_version = "otel_infer"
    sys_version = ""

    def setup(self) -> None:
        """All that is asked has to be there in time, however slowly it comes: others wait."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, CLIENT_TIMEOUT_S))

    def path_without_query(self) -> str:
        """The path, without what follows it."""
        return self.path.partition("?")[0]

    def send_content(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        """The whole answer; underscores in the names of `headers` stand for hyphens."""
        self.close_connection = True
        self.connection.settimeout(CLIENT_TIMEOUT_S)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: what is asked of us is not for a log."""


def start_server(address: str, handler: type[HttpHandler], owner: Any, name: str) -> BackgroundServer:
    """A server at `PORT` or `ADDRESS:PORT`, running; raises `OSError` where it cannot be had."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    try:
        server = (_Ipv6BackgroundServer if ":" in host else BackgroundServer)(
            (host, int(port)), handler, owner
        )
    except (OverflowError, UnicodeError) as reason:
        raise OSError(str(reason)) from None
    try:
        server.start(name)
    except RuntimeError as reason:  # no more threads
        server.server_close()
        raise OSError(str(reason)) from None
    return server
