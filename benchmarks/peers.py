"""Compares systems on transformers with a tiny model: otel_infer, OpenLIT, OpenLLMetry, and OpenTelemetry by hand.

Each system has its own process and receiver. Blocks take turns in random order. All systems share one environment, so
that versions are equal: `make bench-peers` builds one with the peers.
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
from benchmarks.verdict import Figure, Line, estimate_median, make_control, make_exact, make_line

AGAIN = "uninstrumented again"
REQUESTS = {GENERATE: 4, STREAMED: 4, PIPELINE: 8, BATCHING: 24}
"""Per block."""
STAGES = ("queue", "prefill", "decode", "decode step")
MISSING = "not installed; `make bench-peers` builds an environment with it"
Block = Mapping[str, float]


class ExportedSpans(NamedTuple):
    """Spans by name that one system exported for this many requests."""

    requests: int
    names: Mapping[str, int]

    def describe_spans(self) -> str:
        """Returns the spans per request, their names, and the missing stages."""
        spans = sum(self.names.values())
        if not spans:
            return "no spans"
        most = [name for name, _ in Counter(self.names).most_common(6)]
        missing = [stage for stage in STAGES if stage not in self.names]
        left = f"; no {', '.join(missing)}" if missing else ""
        return f"{spans / self.requests:.1f} spans per request: {', '.join(most)}{left}"


class Peer:
    """Starts the process of a system and its receiver."""

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
        answer = self._read_answer()
        self.missing: str = answer["missing"]
        self.other_pids = [self.receiver.pid, *filter(None, [answer["sidecar"]])]

    def run_block(self, workload: str, requests: int) -> Block:
        """Runs one block."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload} {requests}\n")
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of a system ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process and the receiver."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self.receiver.close()


def measure(quick: bool) -> list[Line]:
    """Measures all workloads. Systems that are not installed have a row that states it."""
    rounds = 2 if quick else 15
    mine, others = machine.choose_cores()
    peers = {name: Peer(BARE if name == AGAIN else name) for name in (BARE, AGAIN, *SYSTEMS)}
    lines = [_make_missing_line(name, peer.missing) for name, peer in peers.items() if peer.missing]
    installed = {name: peer for name, peer in peers.items() if not peer.missing}
    for peer in installed.values():
        machine.pin_process(peer.pid, mine)
        for pid in peer.other_pids:
            machine.pin_process(pid, others)
    for workload in WORKLOADS:
        blocks, exported = _measure_rounds(installed, workload, 1 if quick else REQUESTS[workload], rounds)
        lines += make_lines(workload, blocks, exported)
    for peer in peers.values():
        peer.close()
    return lines


def _measure_rounds(
    installed: dict[str, Peer], workload: str, requests: int, rounds: int
) -> tuple[dict[str, list[Block]], dict[str, ExportedSpans]]:
    """Returns the blocks of each system and its spans. A first block of each does not count."""
    rng, blocks = random.Random(1), {name: list[Block]() for name in installed}
    for peer in installed.values():
        peer.run_block(workload, requests)
        peer.receiver.read_counts()
    for _ in range(rounds):
        for name in rng.sample(list(installed), len(installed)):
            blocks[name].append(installed[name].run_block(workload, requests))
    exported = {
        name: ExportedSpans(rounds * requests, peer.receiver.read_counts()["names"])
        for name, peer in installed.items()
    }
    return blocks, exported


def _make_missing_line(name: str, reason: str) -> Line:
    return make_line(f"{name}: not measured", "", make_exact(float("nan")), note=f"{MISSING} ({reason})")


def make_lines(
    workload: str, blocks: Mapping[str, Sequence[Block]], exported: Mapping[str, ExportedSpans]
) -> list[Line]:
    """Returns CPU and wall time per token of each system, above uninstrumented."""
    lines = []
    for clock, clock_name in (("cpu", "CPU"), ("wall", "wall")):
        per_token = {name: _divide_by_tokens(of_system, clock) for name, of_system in blocks.items()}
        usual = (per_token[BARE] + per_token[AGAIN]) / 2
        control = make_control(estimate_median(per_token[AGAIN] / per_token[BARE] - 1))
        for name in blocks:
            if name in (BARE, AGAIN):
                continue
            above = estimate_median(per_token[name] / usual - 1).scale_by(100)
            more = estimate_median(per_token[name] - usual).scale_by(1 / 1000)
            note = _format_note(more, blocks[name], exported[name]) if clock == "cpu" else ""
            lines.append(
                make_line(f"{workload}, {clock_name}: {name}", "%", above, control=control, note=note)
            )
    return lines


def _divide_by_tokens(blocks: Sequence[Block], clock: str) -> Any:
    return np.asarray([block[clock] / block["tokens"] for block in blocks])


def _format_note(more: Figure, blocks: Sequence[Block], exported: ExportedSpans) -> str:
    """Returns µs per token and per request, the sidecar's µs per token, and the exported spans."""
    tokens, requests, sidecar = (
        sum(block[name] for block in blocks) for name in ("tokens", "requests", "sidecar")
    )
    each = tokens / requests
    sidecar_note = f", sidecar {sidecar / tokens / 1000:.1f} µs per token" if sidecar else ""
    return (
        f"{more.value:+.1f} µs [{more.low:.1f}, {more.high:.1f}] per token, {more.value * each:+.0f} µs per request{sidecar_note}; "
        f"{exported.describe_spans()}"
    )
