"""The machine at hand: what it is, how busy it is, and who runs on which core."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import time
from importlib import metadata
from pathlib import Path

PACE_TURNS = 5000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1 << 30
PACKAGES = ("transformers", "torch", "opentelemetry-sdk", "protobuf", "numpy", "isal")


def described() -> dict[str, str]:
    """Processor, system and the versions that matter."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: version for name, version in versions.items() if version},
    }


def load() -> float:
    """How many processes wanted a core over the last minute."""
    return os.getloadavg()[0]


@functools.cache
def cores() -> tuple[set[int], set[int]]:
    """The core for the loop that is measured, and those for everybody else; the same ones where there is but one. Decided
    once in a process: whoever asks later is to keep off the same core."""
    here = allowed()
    mine = fastest(here)
    return mine, here - mine or here


def fastest(among: set[int]) -> set[int]:
    """The core that is the fastest just now: virtual ones share theirs with neighbours that come and go. The calling thread may
    run on all of them afterwards."""
    paces = {}
    for core in among:
        pin_this_thread({core})
        paces[core] = min(pace() for _ in range(5))
    pin_this_thread(among)
    return {min(paces, key=lambda core: paces[core])}


def allowed() -> set[int]:
    """The cores that the calling thread may run on."""
    return os.sched_getaffinity(0)


def pace() -> float:
    """CPU ns for one turn of a fixed loop in Python: how fast the machine is at this moment."""
    began, total = time.thread_time_ns(), 0
    for i in range(PACE_TURNS):
        total += (i * 7) & 3
    return (time.thread_time_ns() - began) / PACE_TURNS


def pin_this_thread(to: set[int]) -> None:
    """Keeps the calling thread there, and what it starts from now on."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, to)


def pin_apart() -> None:
    """Gives the calling thread the core for the loop that is measured, and all other threads of this process the others."""
    mine, others = cores()
    pin_process(os.getpid(), others)
    pin_this_thread(mine)


def pin_process(pid: int, to: set[int]) -> None:
    """Keeps all threads of another process there."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, to)


def keep_memory() -> None:
    """Has this process keep what it frees (mallopt(3)), where its C library can. glibc gives big blocks back after every step
    of a model, and each page that comes anew is a fault: more than half of a step at times, and at others nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _KEPT)


def cpu_ns(pid: int) -> int:
    """CPU time of a process, all threads, as clock_getcpuclockid(3) reads it; /proc/PID/stat counts in 10 ms."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def peak_memory(pid: int) -> int:
    """The most memory the process has held, bytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def own_memory(pid: int) -> int:
    """The memory that the process has for itself alone, bytes. The rings are shared; what is only read of a library is private
    too as soon as nobody else has it open, so it is left out, or memory would grow where another process ends."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith("Private_Dirty"))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
