"""Measures what looking for stalls and reading stacks cost, while 5 % of the steps of an engine are late.

    python -m benchmarks.stalls.cost [--seconds 300] [--usual]

The engine runs steps of 10 ms in another process; one in twenty takes 300 ms, none with `--usual`. The cost is the CPU
time of the sampler and that of the handler in the engine. Exit status 1 if it is 0.1 % of a core or more, or if a signal
was sent while no step was late.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from otel_infer import _clock
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.probes.stalls.sampler import HANDLER_NS_PER_BYTE, StallSampler

LIMIT = 0.001
ENGINE = """
import sys, threading, time
from pathlib import Path
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.recorder import recorder
recorder.start(lambda: FileArena(Path(sys.argv[1])), lambda: None, lambda reason: None)
writer = recorder.acquire_batch_writer("toy")
member, late_every = object(), int(sys.argv[2])
writer.handles[member] = (1).to_bytes(4, "little")
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def run_step(number):
    time.sleep(0.3 if late_every and number % late_every == 0 else 0.01)
print("ready", flush=True)
number = 0
while True:
    number += 1
    step = writer.write_scheduled([member])
    run_step(number)
    writer.ring.write_single_tokens(step, 0)
"""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls.cost", description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--usual", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, "-c", ENGINE, folder, "0" if arguments.usual else "20"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
            try:
                assert engine.stdout is not None
                engine.stdout.readline()
                share, signals = measure_share(Path(folder), arguments.seconds)
            finally:
                engine.kill()
    print(f"{share:.3%} of a core in {arguments.seconds} s, {signals} signals")
    return int(share >= LIMIT or (arguments.usual and signals > 0))


def measure_share(folder: Path, seconds: int) -> tuple[float, int]:
    """Returns the share of a core that the sampler and the handler take, and the number of signals."""
    rings, found = MergedReader(), list[RecordedEvent]()
    rings.discover_rings(folder, _clock.now())
    sampler = StallSampler(lambda: rings.processes, found.append)
    spent, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.thread_time_ns()
        sampler.sleep(2_000_000_000)
        spent += time.thread_time_ns() - began
        rings.add_rings_of_known_files()
        rings.poll(_clock.now())
    (watched,) = sampler._watched.values()
    handler = watched.dump.bytes_read * HANDLER_NS_PER_BYTE
    sampler.close()
    return (spent + handler) / (seconds * 1e9), watched.dump.signals


if __name__ == "__main__":
    sys.exit(main())
