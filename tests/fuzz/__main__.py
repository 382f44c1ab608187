"""Runs each target for its share of the time, or a number of inputs, and prints how many were tried."""

from __future__ import annotations

import argparse
import logging
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from tests.fuzz import asgi, cells, client_streams, settings, tapes

TARGETS: dict[str, Callable[[random.Random], int]] = {
    "cells": cells.run_once,
    "tapes": tapes.run_once,
    "messages": asgi.run_once,
    "settings": settings.run_once,
    "streams": client_streams.run_once,
}
FULL = {"cells": 200_000, "tapes": 20_000, "messages": 20_000, "settings": 100_000, "streams": 100_000}
MAX_INPUT_CPU_S, MAX_INPUT_S = 20.0, 120.0
"""Longest processor time and time of one input; more is a hang. Other programs may take the processor."""
MAX_MEMORY_MIB = 1500


def fuzz(name: str, seconds: float, count: int, seed: int) -> None:
    """Runs a target until the time or the number is reached; raises the first error with its seed."""
    run, done, number = TARGETS[name], 0, 0
    began = time.monotonic()
    while (time.monotonic() - began < seconds) if seconds else done < count:
        started, cpu_before = time.monotonic(), time.process_time()
        input_seed = f"{name} {seed} {number}"
        try:
            done += run(random.Random(input_seed))
        except BaseException:
            print(f"{name}: failed at --only {name} --seed {seed} --input {number}", file=sys.stderr)
            raise
        took, cpu = time.monotonic() - started, time.process_time() - cpu_before
        if cpu > MAX_INPUT_CPU_S or took > MAX_INPUT_S:
            raise AssertionError(
                f"{name}: input {number} of seed {seed} took {took:.0f} s, {cpu:.0f} s of CPU"
            )
        number += 1
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: {done:,} in {number:,} inputs, {time.monotonic() - began:.0f} s, memory {memory:.0f} MiB",
        flush=True,
    )
    if memory > MAX_MEMORY_MIB:
        raise AssertionError(f"{name}: {memory:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time in all (60)")
    parser.add_argument("--full", action="store_true", help="the full numbers instead of a time")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=int, help="run this input only")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    share = 0 if arguments.full else arguments.seconds / len(arguments.only)
    if len(arguments.only) > 1:
        return max(run_alone(name, share, arguments.seed) for name in arguments.only)
    (name,) = arguments.only
    if arguments.input is not None:
        TARGETS[name](random.Random(f"{name} {arguments.seed} {arguments.input}"))
    else:
        fuzz(name, share, FULL[name], arguments.seed)
    return 0


def run_alone(name: str, seconds: float, seed: int) -> int:
    """Runs a target in a process of its own, so that its memory is its own; returns the exit status."""
    amount = ["--seconds", str(seconds)] if seconds else ["--full"]
    command = [sys.executable, "-m", "tests.fuzz", "--only", name, "--seed", str(seed), *amount]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
