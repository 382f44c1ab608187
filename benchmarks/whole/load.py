"""The load of a server, and what its clients and its processes took in a block of time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.whole.switched_server import SwitchedServer


@dataclass(frozen=True)
class Block:
    """The measurements of a block of time. Times are in seconds; the CPU time is of the whole server."""

    seconds: float
    cpu: float
    gaps: Any
    firsts: Any
    lengths: Any
    tokens: int
    errors: int

    @property
    def units(self) -> int:
        """The number of tokens, or of answers if they are not streamed."""
        return self.tokens or len(self.firsts)

    def join(self, other: Block) -> Block:
        """Returns both as one block."""
        return Block(
            self.seconds + other.seconds,
            self.cpu + other.cpu,
            np.concatenate([self.gaps, other.gaps]),
            np.concatenate([self.firsts, other.firsts]),
            np.concatenate([self.lengths, other.lengths]),
            self.tokens + other.tokens,
            self.errors + other.errors,
        )


class Load:
    """Runs the clients, and takes their measurements."""

    def __init__(
        self, server: SwitchedServer, kind: str, number: int, options: dict[str, Any], folder: Path
    ) -> None:
        self._server, self._file = server, folder / "block.npz"
        command = [sys.executable, "-m", "benchmarks.whole.client", str(server.port), kind, str(number)]
        self._process = subprocess.Popen(
            [*command, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure_block(self, seconds: float) -> Block:
        """Measures the server for so long."""
        self._send("drop")
        began, cpu = time.perf_counter(), self._server.read_cpu_ns()
        time.sleep(seconds)
        cpu, lasted = self._server.read_cpu_ns() - cpu, time.perf_counter() - began
        self._send(str(self._file))
        with np.load(self._file) as taken:
            columns = (taken[name] for name in ("gaps", "firsts", "lengths"))
            return Block(
                lasted, cpu / 1e9, *columns, tokens=int(taken["tokens"]), errors=int(taken["errors"])
            )

    def close(self) -> None:
        """Ends the clients."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(command, file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise RuntimeError("the clients ended")
