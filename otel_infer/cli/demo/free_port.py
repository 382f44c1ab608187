"""A TCP port for a server that starts later."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Linux gives higher ports to clients and to listeners on port 0, so no other program takes one of these by chance."""
_TRIES = 100
_random = random.SystemRandom()
"""A seed of the program does not make two processes choose the same."""


def find_free_port() -> int:
    """Returns a port on which nothing listens. Raises RuntimeError if every port that it tries is taken."""
    for port in _random.sample(PORTS, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {_TRIES} between {PORTS.start} and {PORTS.stop} is free")
