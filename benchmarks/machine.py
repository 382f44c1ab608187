"""Describes the machine, reads CPU time and memory of processes, and assigns cores."""

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
_KEPT_BYTES = 1 << 30
PACKAGES = ("vllm", "transformers", "torch", "opentelemetry-sdk", "protobuf", "numpy", "isal")


def describe_machine() -> dict[str, str]:
    """Returns the processor, the system and the versions of packages."""
    versions = {name: _read_version(name) for name in PACKAGES}
    return {
        "processor": f"{_read_processor()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: version for name, version in versions.items() if version},
    }


def read_load() -> float:
    """Returns the load average of the last minute."""
    return os.getloadavg()[0]


@functools.cache
def choose_cores() -> tuple[set[int], set[int]]:
    """Returns the core of the measured loop, and the cores of all other threads (the same if there is only one).
    The choice is made once per process."""
    allowed = read_allowed_cores()
    mine = find_fastest_core(allowed)
    return mine, allowed - mine or allowed


def find_fastest_core(cores: set[int]) -> set[int]:
    """Returns the currently fastest of these cores. Virtual cores share hardware with other machines. The calling
    thread may run on all of them afterwards."""
    paces = {}
    for core in cores:
        pin_this_thread({core})
        paces[core] = min(measure_pace() for _ in range(5))
    pin_this_thread(cores)
    return {min(paces, key=lambda core: paces[core])}


def read_allowed_cores() -> set[int]:
    """Returns the cores on which the calling thread may run."""
    return os.sched_getaffinity(0)


def measure_pace() -> float:
    """Returns the CPU time (ns) of one turn of a fixed loop in Python."""
    began, total = time.thread_time_ns(), 0
    for i in range(PACE_TURNS):
        total += (i * 7) & 3
    return (time.thread_time_ns() - began) / PACE_TURNS


def pin_this_thread(cores: set[int]) -> None:
    """Restricts the calling thread, and threads that it starts later, cores these cores."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)


def pin_apart() -> None:
    """Moves the calling thread to the core of the measured loop, and all other threads of this process to the other
    cores."""
    mine, others = choose_cores()
    pin_process(os.getpid(), others)
    pin_this_thread(mine)


def pin_process(pid: int, cores: set[int]) -> None:
    """Restricts all threads of a process to these cores."""
    for thread in _list_threads(pid):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def keep_memory() -> None:
    """Makes the C library keep freed memory (mallopt(3)), where it can. glibc would return large blocks after every
    step of a model, and page faults would take up to half of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _KEPT_BYTES)


def read_cpu_ns(pid: int) -> int:
    """Returns the CPU time of all threads of a process, by clock_getcpuclockid(3); /proc/PID/stat has a resolution
    of 10 ms."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def read_peak_memory(pid: int) -> int:
    """Returns the largest memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def read_private_memory(pid: int) -> int:
    """Returns the dirty private memory of a process, in bytes. That excludes the shared rings, and clean pages of
    libraries, which become private when another process ends."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().split("\n")
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith("Private_Dirty"))


def _list_threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _read_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
