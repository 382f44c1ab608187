"""How this process began, and that it ends before it served anybody: what no library could tell of it."""

from __future__ import annotations

import sys

from otel_infer import clock, facts, ingress
from otel_infer.ring.recorder import recorder


class Birth:
    """Of one process; a forked child has its own. Told once, however often rings are made that somebody reads."""

    def __init__(self) -> None:
        self._seen_at = clock.now()
        self._fact: facts.ProcessStarted | None = None
        self._is_known = False

    def fact(self) -> facts.ProcessStarted | None:
        """The same whenever it is asked; nothing of an interactive interpreter, which starts no server."""
        if self._is_known or ingress.opener is None or hasattr(sys, "ps1"):
            return None
        if self._fact is None:
            now, wall_now = clock.wall_pair()
            at = clock.process_started_at() or self._seen_at
            self._fact = facts.ProcessStarted(at, wall_now - (now - at), *ingress.opener.ids())
        return self._fact

    def known(self) -> None:
        """Who read the rings up to now has been told; the next one would tell it again."""
        self._is_known = self._fact is not None


def leaving() -> None:
    """The process ends in an orderly way: called when it exits."""
    uncaught = getattr(sys, "last_type", None)
    recorder.startup(facts.ProcessLeft(clock.now(), uncaught.__qualname__ if uncaught else ""))
