"""A thread that cannot read its own stack stays alive; faults of the program end it as ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer.ringbuffer.native import native

pytestmark = pytest.mark.skipif(
    native is None or sys.platform != "linux", reason="no compiled module, or not Linux"
)

PROGRAM = """
import ctypes, faulthandler, os, signal, sys
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.stack_signal import find_free_signal

file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND)
number = find_free_signal()
faulthandler.register(number, file=file, all_threads=False, chain=False)
native.write_stacks_on(number, file)

def write_broken_stack():
    # The name of the file of this function's code is memory that cannot be read, as a frame is that is not filled in.
    code = write_broken_stack.__code__
    words = (ctypes.c_size_t * (code.__sizeof__() // 8)).from_address(id(code))
    at = list(words).index(id(code.co_filename))
    words[at], name = 8, words[at]
    os.kill(os.getpid(), number)
    words[at] = name

def write_stack():
    os.kill(os.getpid(), number)
"""


def run_program(tmp_path: Path, program: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Returns how the program ended, and the stacks that were written."""
    stacks = tmp_path / "stacks"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, str(stacks)], capture_output=True, text=True, timeout=60
    )
    return ended, stacks.read_text()


def test_a_stack_is_written(tmp_path: Path) -> None:
    ended, stacks = run_program(tmp_path, "write_stack()\nprint(native.count_stack_faults())")
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
    assert "in write_stack" in stacks


def test_a_stack_that_cannot_be_read_ends_no_process(tmp_path: Path) -> None:
    ended, _ = run_program(
        tmp_path, "for _ in range(3): write_broken_stack()\nprint(native.count_stack_faults() > 0)"
    )
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython exports its function until 3.12")
def test_the_next_stack_is_written_after_one_that_cannot_be_read(tmp_path: Path) -> None:
    ended, stacks = run_program(tmp_path, "write_broken_stack()\nwrite_stack()")
    assert ended.returncode == 0, ended.stderr
    assert "in write_stack" in stacks


@pytest.mark.parametrize("fault", ["ctypes.string_at(8)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_fault_of_the_program_is_reported_by_its_own_handler(tmp_path: Path, fault: str) -> None:
    ended, _ = run_program(
        tmp_path, f"faulthandler.enable()\nwrite_stack()\nwrite_broken_stack()\nwrite_stack()\n{fault}"
    )
    assert ended.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr


def test_a_forked_child_writes_stacks(tmp_path: Path) -> None:
    ended, stacks = run_program(
        tmp_path,
        """
write_broken_stack()
if not (child := os.fork()):
    native.forget_writing_thread()
    write_stack()
    os._exit(native.count_stack_faults())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert sys.version_info >= (3, 13) or "in write_stack" in stacks
