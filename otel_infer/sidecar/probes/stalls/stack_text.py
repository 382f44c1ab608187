"""Parses what faulthandler writes: the frames of a thread, innermost first.

    Stack (most recent call first):
      File "/srv/app.py", line 31 in lookup

A file name may be any text that a program compiled, so one that is no path is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

_HEAD = "(most recent call first):"
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


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Returns the frames of one stack, innermost first. Names are not checked yet, see `check_frame`.

    Lines before its head are the rest of an earlier one, whose thread had no core in between. Where there are two, one
    came late, so it is not known which is whose: then there is none.
    """
    lines = text.partition(_HEAD)[2].splitlines() if text.count(_HEAD) == 1 else ()
    return tuple(frame for line in lines if (frame := _parse_frame(line)) is not None)


@lru_cache(maxsize=1024)  # most frames of a stack are those of the last one
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


def format_stacks(stacks: Iterable[Sequence[Frame]]) -> str:
    """Returns the stacks of several threads as text, checked frame by frame."""
    lines: list[str] = []
    for number, frames in enumerate(stacks, 1):
        lines += [f"thread {number}", *(f"  {describe_frame(frame)}" for frame in frames)]
    return "\n".join(lines)
