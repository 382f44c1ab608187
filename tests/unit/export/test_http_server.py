"""The ports for scrapes and dumps: idle clients keep nobody out, and pages in a browser read nothing."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from otel_infer.export import http_server
from otel_infer.export.metrics.prometheus_endpoint import ScrapeEndpoint


class EchoHandler(http_server.HttpHandler):
    def do_GET(self) -> None:
        self.send_content(200, "text/plain", self.server.owner)


def start(address: str = "127.0.0.1:0", content: bytes = b"fine") -> http_server.BackgroundServer:
    return http_server.start_server(address, EchoHandler, content, "test")


@pytest.fixture
def server() -> Iterator[http_server.BackgroundServer]:
    server = start()
    yield server
    server.close()


def get(port: int, *hosts: str, address: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, port, timeout=3)
    try:
        connection.putrequest("GET", "/", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def connect(port: int, text: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(text)
    return connection


@pytest.mark.parametrize("count", [1, http_server.MAX_CONNECTIONS + 8])
@pytest.mark.parametrize("text", [b"", b"GET / HT", b"GET / HTTP/1.0\r\nHost: "])
def test_idle_connections_keep_nobody_out(
    server: http_server.BackgroundServer, count: int, text: bytes
) -> None:
    idle = [connect(server.server_port, text) for _ in range(count)]
    began = time.monotonic()
    assert get(server.server_port, "localhost") == (200, b"fine")
    assert time.monotonic() - began < http_server.CLIENT_TIMEOUT_S / 2
    for connection in idle:
        connection.close()


def test_clients_that_read_nothing_keep_nobody_out() -> None:
    server = start(content=bytes(32 << 20))
    idle = [connect(server.server_port, b"GET / HTTP/1.0\r\n\r\n") for _ in range(3)]
    assert get(server.server_port, "localhost")[0] == 200
    server.close()
    for connection in idle:
        connection.close()


def test_a_connection_ends_at_its_deadline(
    server: http_server.BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CLIENT_TIMEOUT_S", 0.2)
    connection = connect(server.server_port, b"GET / HTTP/1.0\r\n")
    began = time.monotonic()
    while time.monotonic() - began < 3:
        try:
            connection.sendall(b"A: b\r\n")
            time.sleep(0.02)
        except OSError:
            break
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9464", "127.8.9.1", "[::1]:9", "::1"])  # fmt: skip
def test_names_of_this_machine_are_served(server: http_server.BackgroundServer, host: str) -> None:
    assert get(server.server_port, host) == (200, b"fine")
    assert get(server.server_port) == (200, b"fine")


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:9464", "localhost.attacker.example", "127.0.0.1.nip.io", "10.0.0.1", "", "[fe80::1]"])  # fmt: skip
def test_other_names_are_refused_on_loopback(server: http_server.BackgroundServer, host: str) -> None:
    """A page can have its own name resolved to 127.0.0.1, but its browser still sends that name."""
    status, content = get(server.server_port, host)
    assert status == 403
    assert b"Host" in content
    assert get(server.server_port, "localhost", host)[0] == 403


def test_any_name_is_served_on_other_addresses() -> None:
    server = start("0.0.0.0:0")
    assert get(server.server_port, "prometheus.example:9464") == (200, b"fine")
    server.close()


def test_waiting_scrapes_get_the_same_metrics() -> None:
    """A scrape that begins while another one waits does not take its metrics away."""
    endpoint, found = ScrapeEndpoint("0"), list[object]()
    waiting = [
        threading.Thread(target=lambda: found.append(endpoint.wait_for_metrics()), daemon=True)
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
        time.sleep(0.05)
    endpoint.publish_metrics("metrics")
    for thread in waiting:
        thread.join(1)
    assert found == ["metrics"] * 3
