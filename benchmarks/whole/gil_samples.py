"""Samples of which thread holds the GIL of a server, by py-spy, with native frames.

    py-spy record --gil --native --subprocesses --full-filenames --format raw

A sample is ours if its innermost library is otel_infer. The interpreter and the C library are no libraries here, nor are
modules that only work for their caller (struct, time). A sample inside them belongs to the frame above. Modules that run
other code (asyncio, threading, queue) are libraries, because hooks wrap and call them. wrapt and OpenTelemetry count as
ours below a frame of ours.

With native frames py-spy stops the server for each sample. Timers are late afterwards, and their work is sampled too
often. In a server of `generate`, our timer of the event loop has 0.1 to 0.2 % of the samples without stops, 0.7 to 0.8 %
at 25 and 50 a second, and 1.8 % at 250. So native samples are few per second. A second recording does not stop the
server. It has no native frames, so a compiled module of ours would count for its caller there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import otel_infer
from benchmarks.whole.switched_server import SIDECAR

SAMPLES = 10_000
NATIVE, NONBLOCKING = "--native", "--nonblocking"
RECORD_S, MIN_RECORD_S = 30.0, 2
PACKAGE = str(Path(otel_infer.__file__).parent) + "/"
STDLIB = sysconfig.get_path("stdlib") + "/"
FRAME = re.compile(r"^(?P<name>.*) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
PROCESS = re.compile(r'^(process \d+:".*?")(?:;|$)')
RUNS_OTHER_CODE = re.compile(
    r"^(asyncio|concurrent|multiprocessing|logging)/|^(threading|queue|selectors|socket|socketserver|ssl)\.py$"
)
"""Parts of the standard library, below its folder, that are libraries of their own."""
NATIVE_LIBRARIES = re.compile(r"/_?(asyncio|queue|ssl|socket|select)(module)?\.(c|h|cpython\S*so)$")
"""Modules of the interpreter that are libraries of their own."""
INTERPRETER = re.compile(
    r"/libpython[^/]*$|/(Modules|Objects|Python|Include|Parser)/|/include/python3|/lib-dynload/|/bin/python[\d.]*$"
)
SYSTEM = re.compile(r"^(/usr)?/lib(64)?/|^\[|/sysdeps/|^\./")
NO_LIBRARY_OF_ITS_OWN = re.compile(r"/site-packages/(opentelemetry|wrapt|typing_extensions)[/.]")


@dataclass
class GilShares:
    """Counts of samples: all, ours by hook and by innermost function, and (all, ours) of each process."""

    total: int = 0
    hooks: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    processes: dict[str, list[int]] = field(default_factory=dict)

    def add_samples(self, samples: Iterable[str], sources: frozenset[str] = frozenset()) -> None:
        """Adds the lines of a raw recording; those of a sidecar are left out."""
        for line in samples:
            stack, _, count = line.rstrip().rpartition(" ")
            process, frames = split_stack(stack)
            if SIDECAR in process:
                continue
            ours = find_our_frames(frames, sources)
            self.total += int(count)
            counts = self.processes.setdefault(process.partition(":")[0], [0, 0])
            counts[0] += int(count)
            if ours:
                self.hooks[ours[0]] += int(count)
                self.functions[ours[-1]] += int(count)
                counts[1] += int(count)

    @property
    def share(self) -> float:
        """Our share of all samples."""
        return self.hooks.total() / self.total if self.total else float("nan")


def split_stack(stack: str) -> tuple[str, list[str]]:
    """Returns the process and its frames, outermost first. Its parents come before it, and commands may contain
    semicolons."""
    process, rest = "process ?", stack
    while match := PROCESS.match(rest):
        process, rest = match[1], rest[match.end() :]
    return process, rest.split(";") if rest else []


def find_our_frames(frames: Sequence[str], sources: frozenset[str] = frozenset()) -> list[str]:
    """Returns our frames below the last frame of any other library, outermost first; none if that is the innermost."""
    ours: list[str] = []
    for frame in reversed(frames):
        owner = find_owner(frame, sources)
        if owner is False:
            break
        if owner:
            ours.append(re.sub(r":\d+\)$", ")", frame.replace(PACKAGE, "")))
    return ours[::-1]


def find_owner(frame: str, sources: frozenset[str] = frozenset()) -> bool | None:
    """Returns whether a frame is ours; None for a frame that belongs to its caller."""
    match = FRAME.match(frame)
    if match is None:
        return None
    file = match["file"]
    if file.startswith(PACKAGE) or file.rpartition("/")[2] in sources:
        return True
    if NATIVE_LIBRARIES.search(file):
        return False
    if file.startswith(STDLIB) and "/site-packages/" not in file and "/lib-dynload/" not in file:
        return False if RUNS_OTHER_CODE.search(file.removeprefix(STDLIB)) else None
    if SYSTEM.search(file) or INTERPRETER.search(file) or NO_LIBRARY_OF_ITS_OWN.search(file):
        return None
    return None if file.startswith(("<", "?")) else False


def list_our_sources() -> frozenset[str]:
    """Returns the names of the sources of our compiled module: with debugging information a frame shows its source.

    Names of functions would not do, because functions of the interpreter are inlined into modules of others too.
    """
    return frozenset(path.name for path in Path(PACKAGE).rglob("*.[ch]"))


def find_py_spy() -> str:
    """Returns the path of py-spy, beside this interpreter or on PATH. Raises SystemExit if there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise SystemExit("py-spy is not installed: pip install 'otel-infer[bench]'")
    return found


def record_samples(
    pid: int, folder: Path, rate: int, samples: int, max_s: float, way: str = NATIVE
) -> tuple[GilShares, str]:
    """Samples a process and its descendants until there are enough samples. Returns also why native frames are
    missing; empty if they are not, or if they are not wanted."""
    shares, sources, missing = GilShares(), list_our_sources(), ""
    until = time.monotonic() + max_s  # py-spy may take longer than it should, so its duration is not counted
    while shares.total < samples and (left := until - time.monotonic()) > 0:
        output = folder / "samples.raw"
        output.unlink(missing_ok=True)
        seconds = max(int(min(RECORD_S, left)), MIN_RECORD_S)
        completed = _run_py_spy(pid, output, rate, seconds, () if missing else (way,))
        if output.exists():
            shares.add_samples(output.read_text().splitlines(), sources)
        elif missing or way != NATIVE:
            raise RuntimeError(f"py-spy failed: {completed.stderr[-2000:]}")
        else:
            missing = f"without native frames: {completed.stderr.strip()[-200:]}"
    return shares, missing


def _run_py_spy(pid: int, output: Path, rate: int, seconds: int, options: Sequence[str]) -> Any:
    command = [find_py_spy(), "record", "--gil", "--subprocesses", "--full-filenames", "--format", "raw"]
    command += ["--rate", str(rate), "--duration", str(seconds), "--pid", str(pid), "--output", str(output)]
    return subprocess.run([*command, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL)
