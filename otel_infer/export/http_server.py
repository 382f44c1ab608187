"""Small HTTP servers beside the inference server, on loopback by default.

Each connection has a thread and a deadline. At most `MAX_CONNECTIONS` are open: a further one ends the oldest, so
idle connections cannot keep others out. On loopback the Host header must name this machine, because a page in a
browser can have the name of its own server resolved to 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CLIENT_TIMEOUT_S, CLOSE_TIMEOUT_S = 5.0, 1.0
CONNECTION_TIMEOUT_S = 3 * CLIENT_TIMEOUT_S
"""Longest life of a connection: reading a request, preparing its answer, and sending it."""
MAX_CONNECTIONS = 32


class BackgroundServer(ThreadingHTTPServer):
    """An HTTP server that runs in separate threads. `owner`: the object that its handlers use."""

    daemon_threads, block_on_close = True, False

    def __init__(self, address: tuple[str, int], handler: type[HttpHandler], owner: Any) -> None:
        self.owner = owner
        self._lock = threading.Lock()
        self._connections: dict[socket, None] = {}
        """Open connections, the oldest first."""
        super().__init__(address, handler)
        self.is_loopback = _is_local_name(str(self.server_address[0]))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own; if too many are open, the oldest one ends."""
        with self._lock:
            oldest = next(iter(self._connections)) if len(self._connections) >= MAX_CONNECTIONS else None
            if oldest is not None:
                del self._connections[oldest]
            self._connections[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):  # its thread has just closed it
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection; called in its thread."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

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
    """The input of a connection until a deadline (monotonic s); raises `TimeoutError` after it."""

    def __init__(self, connection: socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

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
        """Limits the time for reading a request and for its answer."""
        super().setup()
        now = time.monotonic()
        self._deadline = now + CONNECTION_TIMEOUT_S
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, now + CLIENT_TIMEOUT_S))

    def parse_request(self) -> bool:
        """Reads the request line and the headers; rejects names of other machines on loopback."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        if self.server.is_loopback and not all(map(_is_local_name, hosts)):
            self.send_content(403, "text/plain", b"the Host header must be localhost or a loopback address\n")
            return False
        return True

    def path_without_query(self) -> str:
        """Returns the path without its query."""
        return self.path.partition("?")[0]

    def send_content(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        """Sends the whole response. Underscores in the names of `headers` become hyphens."""
        self.close_connection = True
        self.connection.settimeout(max(self._deadline - time.monotonic(), 0.1))
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


def _is_local_name(host: str) -> bool:
    """Returns whether a host, with or without a port, is localhost or a loopback address."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name.rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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
