"""The error by which a command ends before its work: wrong arguments, or a missing server or package."""

from __future__ import annotations


class CommandError(Exception):
    """Reason why a command cannot run; `main` prints it and returns 2."""
