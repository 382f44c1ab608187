"""Injects stalls at random lines of a server that bears a usual load, and checks which function is named.

    python -m benchmarks.stalls [--stalls 20] [--seed N]

Exit status 1 if fewer than nine of ten stalls are named, if a function is named wrongly, if a signal was sent while
nothing was late, or if a text of a request is on the tape.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.battery.draw import ROOT, VARIABLES
from benchmarks.stalls.program import Stalling, write_program
from otel_infer import _clock
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.ringbuffer.events import CodeLocated
from otel_infer.sidecar.recording import file

CANARY = "canary-6d3f1c"
USUAL_S, QUIET_S = 6.0, 0.5
LEAST_NAMED = 0.9


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__)
    parser.add_argument("--stalls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return inject_stalls(Path(folder), random.Random(arguments.seed), arguments.stalls)


def inject_stalls(folder: Path, rng: random.Random, count: int) -> int:
    """Injects stalls one after another; returns the exit status."""
    source, stalls = write_program(rng, count)
    (folder / "server.py").write_text(source)
    port, tape = find_free_port(), folder / "server.tape"
    command = [sys.executable, "-m", "otel_infer", "run", "--tape", str(tape), "--", sys.executable]
    process = subprocess.Popen(
        [*command, str(folder / "server.py"), str(port)], env={"PYTHONPATH": str(ROOT), **VARIABLES}
    )
    try:
        if not wait_until_healthy(f"http://127.0.0.1:{port}", lambda: process.poll() is None, 60):
            raise RuntimeError("the server did not start")
        stopped = threading.Event()
        load = threading.Thread(target=_send_usual, args=(port, stopped))
        load.start()
        began = _clock.now()
        time.sleep(USUAL_S)
        usual = began, _clock.now()
        periods = [_stall(port, stall, rng.uniform(0.3, 1.2)) for stall in stalls]
        stopped.set()
        load.join()
    finally:
        process.terminate()
        process.wait(30)
    samples = read_samples(tape)
    return judge(stalls, periods, usual, samples, has_text=CANARY.encode() in _read_all(tape))


def _send_usual(port: int, stopped: threading.Event) -> None:
    """Sends a request that takes 20 ms after another, so that requests are in flight."""
    while not stopped.wait(0.01):
        _post(port, "usual", {"text": CANARY})


def _stall(port: int, stall: Stalling, seconds: float) -> tuple[int, int]:
    """Sends the request that stalls; returns its period (monotonic ns)."""
    began = _clock.now()
    _post(port, stall.path, {"seconds": seconds, "text": f"{CANARY} the quick brown fox " * 20})
    if stall.kind == "sleep in a callback":
        time.sleep(seconds)
    ended = _clock.now()
    time.sleep(QUIET_S)
    return began, ended


def _post(port: int, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", f"/{path}", json.dumps(body), {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise RuntimeError(f"/{path}: HTTP status {status}")


def read_samples(tape: Path) -> list[CodeLocated]:
    """Returns the samples of late threads on a tape."""
    return [
        recorded.event
        for batch in file.read_batches(tape)
        for recorded in batch.recorded_events
        if isinstance(recorded.event, CodeLocated)
    ]


def _read_all(tape: Path) -> bytes:
    import gzip

    content = tape.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def judge(
    stalls: list[Stalling],
    periods: list[tuple[int, int]],
    usual: tuple[int, int],
    samples: list[CodeLocated],
    has_text: bool,
) -> int:
    """Prints which stalls were named; returns the exit status."""
    named = wrong = 0
    for stall, (begin, end) in zip(stalls, periods):
        found = {sample.function for sample in samples if begin <= sample.at <= end + 100_000_000}
        named += stall.name in found
        wrong += bool(found - {stall.name})
        print(
            f"{stall.kind:<28} {(end - begin) / 1e9:5.2f} s  {stall.name:<18} named: {', '.join(sorted(found)) or '-'}"
        )
    early = sum(usual[0] <= sample.at <= usual[1] for sample in samples)
    print(
        f"{named} of {len(stalls)} named, {wrong} with a wrong function, {early} samples while nothing was late"
    )
    if has_text:
        print("a text of a request is on the tape")
    return int(named < LEAST_NAMED * len(stalls) or wrong > 0 or early > 0 or has_text)


if __name__ == "__main__":
    sys.exit(main())
