"""What a forked child does first, also where Python did not see the fork: uWSGI forks its workers in C.

Python calls the functions of `os.register_at_fork` for its own forks alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_after_in_child: list[Callable[[], object]] = []
_pid = os.getpid()


def call_in_child(function: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
    """Has the function called in each child process, before it records anything. `before`: called in the parent, if Python forks."""
    os.register_at_fork(before=before, after_in_child=function)
    _after_in_child.append(function)


def notice_fork() -> None:
    """Calls these functions in a child whose fork Python did not see. To be called before a request is opened."""
    if os.getpid() != _pid:
        _note_process()
        for function in _after_in_child:
            function()


def _note_process() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_process)
