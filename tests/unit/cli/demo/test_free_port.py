"""Ports of servers that start later."""

from __future__ import annotations

import socket

import pytest

from otel_infer.cli.demo import free_port


def test_port_is_none_that_the_system_gives_to_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert free_port.find_free_port() < free_port.PORTS.stop <= other.getsockname()[1]


def test_port_with_a_listener_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port.find_free_port()
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(free_port, "PORTS", range(first, first + 1))
        monkeypatch.setattr(free_port, "_TRIES", 1)
        with pytest.raises(RuntimeError, match="no port of 1 between"):
            free_port.find_free_port()
