"""Delays a step of a server: the test's side of `stalling`."""

from __future__ import annotations

import json
from typing import Any

from tests.support.served import Server
from tests.support.toy_server import wait_until


def stall(server: Server, kind: str, length_ms: int, members: int = 1) -> None:
    """Delays the next step of this kind with at least `members` members; needs a scheduler of `stalling`."""
    new_file = server.log.with_suffix(".new")
    new_file.write_text(f"{kind} {length_ms} {members}")
    new_file.rename(server.log.with_suffix(".stall"))


def stalling(server: Server) -> None:
    """Returns while that step is being delayed."""
    wait_until(server.log.with_suffix(".stalling").exists)


def stalled(server: Server) -> dict[str, Any]:
    """Returns which step was delayed, once it is over."""
    path = server.log.with_suffix(".done")
    wait_until(path.exists)
    done: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return done
