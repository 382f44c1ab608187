"""Frames of a dump are parsed; a text that a program compiled is neither a file nor a function."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

from otel_infer.sidecar.probes.stalls.stack_text import Frame, check_frame, format_stacks, parse_stacks

DUMP = """Thread 0x00007f2a4c0d9700 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/srv/app.py", line 31 in lookup

Current thread 0x00007f2a4d1ff740 [main] (most recent call first):
  Garbage-collecting
  File "<string>", line 1 in <module>
"""


def test_frames_are_innermost_first() -> None:
    first, second = parse_stacks(DUMP)
    assert (first.ident, second.ident) == (0x7F2A4C0D9700, 0x7F2A4D1FF740)
    assert first.frames == (
        Frame("/usr/lib/python3.11/re/__init__.py", 166, "match"),
        Frame("/srv/app.py", 31, "lookup"),
    )
    assert second.frames == (Frame("<string>", 1, "<module>"),)


def test_compiled_text_is_no_file() -> None:
    canary = "what is wrong with my heart"
    (stack,) = parse_stacks(f'Thread 0x1 (most recent call first):\n  File "{canary}", line 3 in {canary}\n')
    assert canary not in format_stacks([stack])
    assert check_frame(stack.frames[0]) == Frame("<unknown>", 3, "<unknown>")
    assert check_frame(Frame("/srv/app.py", 3, "<lambda>")) == Frame("/srv/app.py", 3, "<lambda>")


def test_a_real_dump_has_every_thread(tmp_path: Path) -> None:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    with (tmp_path / "dump").open("w+") as dump:
        faulthandler.dump_traceback(dump, all_threads=True)
        dump.seek(0)
        stacks = {stack.ident: stack for stack in parse_stacks(dump.read())}
    done.set()
    assert stacks[waiting.ident or 0].frames[0].function == "wait"
    assert stacks[threading.get_ident()].frames[0].function == "test_a_real_dump_has_every_thread"


def test_text_that_is_no_dump_has_no_stacks() -> None:
    assert parse_stacks("") == [] == parse_stacks("Thread x\n\n  File ")
