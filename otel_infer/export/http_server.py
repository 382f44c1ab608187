"""Small HTTP servers beside the inference server: one request at a time, on loopback by default."""

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
    """An HTTP server that runs in a separate thread. `owner`: the object that its handlers use."""

    def __init__(self, address: tuple[str, int], handler: type[HttpHandler], owner: Any) -> None:
        self.owner = owner
        super().__init__(address, handler)

    def start(self, name: str) -> None:
        """Starts the thread that serves requests."""
        threading.Thread(target=self.serve_forever, args=(0.5,), name=name, daemon=True).start()

    def close(self) -> None:
        """Releases the port. A request in progress delays this by at most `CLOSE_TIMEOUT_S`."""
        stopping = threading.Thread(target=self.shutdown, daemon=True)
        stopping.start()
        stopping.join(CLOSE_TIMEOUT_S)
        self.server_close()

    def server_bind(self) -> None:
        """Binds the port without a look-up of the host name, which may take long.

        SO_REUSEADDR makes the port available again right after a restart.
        """
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs a failed request at debug level, because it is common that a client disconnects."""
        log.debug("request to port %s failed", self.server_port, exc_info=True)


class _Ipv6BackgroundServer(BackgroundServer):
    address_family = AF_INET6


class _DeadlineReader(io.RawIOBase):
    """The input of a connection until a deadline; raises `TimeoutError` after it."""

    def __init__(self, connection: socket, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class HttpHandler(BaseHTTPRequestHandler):
    """Base of the handlers.

    It sends each response in one piece, without a Python version, and logs no requests.
    """

    server: BackgroundServer
    timeout = CLIENT_TIMEOUT_S
    server_version = "otel_infer"
    sys_version = ""

    def setup(self) -> None:
        """Limits the time for reading a request, because other requests wait meanwhile."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, CLIENT_TIMEOUT_S))

    def path_without_query(self) -> str:
        """Returns the path without its query."""
        return self.path.partition("?")[0]

    def send_content(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        """Sends the whole response. Underscores in the names of `headers` become hyphens."""
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
        """Logs nothing, because requests may contain private data."""


def start_server(address: str, handler: type[HttpHandler], owner: Any, name: str) -> BackgroundServer:
    """Returns a running server at `PORT` or `ADDRESS:PORT`; raises `OSError` if it cannot listen there."""
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
