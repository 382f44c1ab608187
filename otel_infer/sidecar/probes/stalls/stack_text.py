"""Parses what faulthandler writes: the frames of every thread, innermost first.

    Thread 0x00007f2a4c0d9700 (most recent call first):
      File "/srv/app.py", line 31 in lookup

A file name may be any text that a program compiled, so one that is no path is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
_FRAME_BEGIN = '  File "'
_PATH = re.compile(r"/[^\x00-\x1f\"<>]+\.(?:py|pyx|pyi|pyc|so)")
_BUILTIN_FILE = re.compile(r"<(?:frozen [\w.]+|string|stdin)>")
_FUNCTION = re.compile(r"\w+|<(?:module|lambda|listcomp|setcomp|dictcomp|genexpr)>")
UNKNOWN = "<unknown>"


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str


class ThreadStack:
    """The stack of a thread. `ident`: that of `threading.get_ident`."""

    def __init__(self, ident: int, lines: list[str]) -> None:
        self.ident, self._lines = ident, lines

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frames, innermost first; parsed on demand, because of many threads few matter."""
        return tuple(frame for line in self._lines if (frame := _parse_frame(line)) is not None)


def parse_stacks(text: str) -> list[ThreadStack]:
    """Returns the stacks of one dump. Names are not checked yet, see `check_frame`."""
    stacks = []
    for block in text.split("\n\n"):
        head, *lines = block.strip("\n").splitlines() or [""]
        thread = _THREAD.match(head)
        if thread is not None:
            stacks.append(ThreadStack(int(thread[1], 16), lines))
    return stacks


def _parse_frame(line: str) -> Frame | None:
    if not line.startswith(_FRAME_BEGIN):
        return None
    file, _, place = line[len(_FRAME_BEGIN) :].rpartition('", line ')
    number, _, function = place.partition(" in ")
    return Frame(file, int(number), function) if number.isdigit() else None


def check_frame(frame: Frame) -> Frame:
    """Returns a frame whose file and function are names, not any text that a program compiled."""
    is_file = _PATH.fullmatch(frame.file) or _BUILTIN_FILE.fullmatch(frame.file)
    is_function = _FUNCTION.fullmatch(frame.function)
    return Frame(frame.file if is_file else UNKNOWN, frame.line, frame.function if is_function else UNKNOWN)


def describe_frame(frame: Frame | None) -> str:
    """Returns a frame as text, checked; "" for none."""
    if frame is None:
        return ""
    checked = check_frame(frame)
    return f"{checked.function} {checked.file}:{checked.line}"


def format_stacks(stacks: Sequence[ThreadStack]) -> str:
    """Returns the stacks of all threads as text, checked frame by frame."""
    lines: list[str] = []
    for number, stack in enumerate(stacks, 1):
        lines += [f"thread {number}", *(f"  {describe_frame(frame)}" for frame in stack.frames)]
    return "\n".join(lines)
