"""Frames of a stack are parsed; a text that a program compiled is neither a file nor a function."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from otel_infer.sidecar.probes.stalls.stack_text import Frame, check_frame, format_stacks, parse_stack

STACK = """Stack (most recent call first):
  Garbage-collecting
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/srv/app.py", line 31 in lookup
"""


def test_frames_are_innermost_first() -> None:
    assert parse_stack(STACK) == (
        Frame("/usr/lib/python3.11/re/__init__.py", 166, "match"),
        Frame("/srv/app.py", 31, "lookup"),
    )


def test_the_rest_of_an_earlier_stack_is_left_out() -> None:
    assert parse_stack('  File "/srv/other.py", line 1 in <module>\n' + STACK) == parse_stack(STACK)
    assert parse_stack(STACK + STACK) == ()  # one of them came late


def test_compiled_text_is_no_file() -> None:
    canary = "what is wrong with my heart"
    stack = parse_stack(f'Stack (most recent call first):\n  File "{canary}", line 3 in {canary}\n')
    assert stack == (Frame(canary, 3, canary),)
    assert canary not in format_stacks([stack])
    assert check_frame(stack[0]) == Frame("<unknown>", 3, "<unknown>")
    assert check_frame(Frame("/srv/app.py", 3, "<lambda>")) == Frame("/srv/app.py", 3, "<lambda>")


def test_a_real_stack_is_read(tmp_path: Path) -> None:
    with (tmp_path / "stack").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        assert parse_stack(file.read())[0].function == "test_a_real_stack_is_read"


def test_text_that_is_no_stack_has_no_frames() -> None:
    assert parse_stack("") == () == parse_stack("Stack (most recent call first):\n  File x, line y")
