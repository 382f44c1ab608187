"""Parses what faulthandler writes: the frames of every thread, innermost first.

    Thread 0x00007f2a4c0d9700 (most recent call first):
      File "/srv/app.py", line 31 in lookup

A file name may be any text that a program compiled, so one that is no path is replaced.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.+)')
_PATH = re.compile(r"/[^\x00-\x1f\"<>]+\.(?:py|pyx|pyi|pyc|so)")
_BUILTIN_FILE = re.compile(r"<(?:frozen [\w.]+|string|stdin)>")
_FUNCTION = re.compile(r"\w+|<(?:module|lambda|listcomp|setcomp|dictcomp|genexpr)>")
UNKNOWN_FILE = "<unknown>"


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str


class ThreadStack(NamedTuple):
    """The frames of a thread, innermost first. `ident`: that of `threading.get_ident`."""

    ident: int
    frames: tuple[Frame, ...]


def parse_stacks(text: str) -> list[ThreadStack]:
    """Returns the stacks of one dump."""
    stacks: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            stacks.append((int(thread[1], 16), []))
        elif stacks and (frame := _FRAME.fullmatch(line)) is not None:
            stacks[-1][1].append(Frame(_check_file(frame[1]), int(frame[2]), _check_function(frame[3])))
    return [ThreadStack(ident, tuple(frames)) for ident, frames in stacks]


def _check_file(name: str) -> str:
    is_name = _PATH.fullmatch(name) or _BUILTIN_FILE.fullmatch(name)
    return name if is_name else UNKNOWN_FILE


def _check_function(name: str) -> str:
    return name if _FUNCTION.fullmatch(name) else UNKNOWN_FILE
