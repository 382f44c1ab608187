"""Real transformers with a tiny model: uninstrumented, ours, OpenLIT, OpenLLMetry, and OpenTelemetry by hand.

Each system has a process and a receiver of its own; blocks take turns, in an order drawn anew for each round. All run in
one environment, so that they share every version: `make bench-peers` makes one in which the peers are installed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.peer import BARE, BATCHING, GENERATE, PIPELINE, STREAMED, SYSTEMS, WORKLOADS
from benchmarks.receiver import Receiver
from benchmarks.verdict import Figure, Line, against_itself, exactly, line, median

AGAIN = "uninstrumented again"
REQUESTS = {GENERATE: 4, STREAMED: 4, PIPELINE: 8, BATCHING: 24}
"""Of a block."""
STAGES = ("queue", "prefill", "decode", "decode step")
MISSING = "not installed here: `make bench-peers` makes an environment with it"
Block = Mapping[str, float]


class Seen(NamedTuple):
    """What one system exported of so many requests."""

    requests: int
    names: Mapping[str, int]

    def said(self) -> str:
        """In words: spans a request, and which."""
        spans = sum(self.names.values())
        if not spans:
            return "sees nothing of it"
        most = [name for name, _ in Counter(self.names).most_common(6)]
        unseen = [stage for stage in STAGES if stage not in self.names]
        left = f"; no {', '.join(unseen)}" if unseen else ""
        return f"{spans / self.requests:.1f} spans a request: {', '.join(most)}{left}"


class Peer:
    """The parent's side of one process, with its receiver."""

    def __init__(self, system: str) -> None:
        self.receiver = Receiver()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer", system, self.receiver.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        said = self._answer()
        self.missing: str = said["missing"]
        self.beside = [self.receiver.pid, *filter(None, [said["sidecar"]])]

    def block(self, workload: str, requests: int) -> Block:
        """One block of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload} {requests}\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError("a system broke off; what it said is above")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self.receiver.close()


def measure(quick: bool) -> list[Line]:
    """All workloads; systems that are not installed are named in the table."""
    rounds = 2 if quick else 15
    mine, others = machine.cores()
    peers = {name: Peer(BARE if name == AGAIN else name) for name in (BARE, AGAIN, *SYSTEMS)}
    lines = [_missing(name, peer.missing) for name, peer in peers.items() if peer.missing]
    here = {name: peer for name, peer in peers.items() if not peer.missing}
    for peer in here.values():
        machine.pin_process(peer.pid, mine)
        for pid in peer.beside:
            machine.pin_process(pid, others)
    for workload in WORKLOADS:
        found, seen = _rounds(here, workload, 1 if quick else REQUESTS[workload], rounds)
        lines += lines_of(workload, found, seen)
    for peer in peers.values():
        peer.close()
    return lines


def _rounds(
    here: dict[str, Peer], workload: str, requests: int, rounds: int
) -> tuple[dict[str, list[Block]], dict[str, Seen]]:
    """A first block of each does not count."""
    chance, found = random.Random(1), {name: [] for name in here}
    for peer in here.values():
        peer.block(workload, requests)
        peer.receiver.counted()
    for _ in range(rounds):
        for name in chance.sample(list(here), len(here)):
            found[name].append(here[name].block(workload, requests))
    seen = {name: Seen(rounds * requests, here[name].receiver.counted()["names"]) for name in here}
    return found, seen


def _missing(name: str, reason: str) -> Line:
    return line(f"{name}: not measured", "", exactly(float("nan")), note=f"{MISSING} ({reason})")


def lines_of(workload: str, found: Mapping[str, Sequence[Block]], seen: Mapping[str, Seen]) -> list[Line]:
    """CPU and wall per token of each system, above uninstrumented."""
    lines = []
    for clock, said in (("cpu", "CPU"), ("wall", "wall")):
        per_token = {name: _per_token(blocks, clock) for name, blocks in found.items()}
        usual = (per_token[BARE] + per_token[AGAIN]) / 2
        control = against_itself(median(per_token[AGAIN] / per_token[BARE] - 1))
        for name in found:
            if name in (BARE, AGAIN):
                continue
            above = median(per_token[name] / usual - 1).scaled(100)
            more = median(per_token[name] - usual).scaled(1 / 1000)
            note = _note(more, found[name], seen[name]) if clock == "cpu" else ""
            lines.append(line(f"{workload}, {said}: {name}", "%", above, control=control, note=note))
    return lines


def _per_token(blocks: Sequence[Block], clock: str) -> Any:
    return np.asarray([block[clock] / block["tokens"] for block in blocks])


def _note(more: Figure, blocks: Sequence[Block], seen: Seen) -> str:
    """Beside the ratio: µs a token and a request, the sidecar's if there is one, and what is seen for it."""
    tokens, requests, sidecar = (
        sum(block[name] for block in blocks) for name in ("tokens", "requests", "sidecar")
    )
    each = tokens / requests
    beside = f", sidecar {sidecar / tokens / 1000:.1f} µs a token" if sidecar else ""
    return (
        f"{more.value:+.1f} µs [{more.low:.1f}, {more.high:.1f}] a token, {more.value * each:+.0f} µs a request{beside}; "
        f"{seen.said()}"
    )
