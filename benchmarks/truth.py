"""What the client saw against what the trace says: signed differences, request by request.

    python benchmarks/truth.py [--requests N] [--concurrency N] [--client ours|guidellm|aiperf] [--json FILE] [--report]

Our own client shares no code with otel_infer and sends a `traceparent`, so each of its requests is compared with its own
trace. GuideLLM and AIPerf send none: then the distributions are compared. A client that did not get the CPU when it wanted
it has seen its own delays; how late a thread beside it woke up is the control.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine, verdict
from benchmarks.served import Served
from benchmarks.verdict import Control, Figure, Gate, Line, bootstrapped, exactly, line
from otel_infer.assembly.records.request import RequestRecord

REQUESTS, CONCURRENCY = 240, 8
MEDIAN_MS, P95_MS, SHARE = 5.0, 15.0, 5.0
"""The gates: the median of the differences is in 0 to 5 ms; of their sizes the 95th percentile is at most 15 ms or 5 %; the
median gap between tokens differs by at most 5 %."""
LATE_MS = 5.0
TICK_S = 0.002


def measure(quick: bool) -> list[Line]:
    """The lines for the table."""
    return own_client(24 if quick else REQUESTS, 4 if quick else CONCURRENCY)


def own_client(requests: int, concurrency: int) -> list[Line]:
    """Request by request."""
    from otel_infer.cli.demo.load_client import run_load

    served = Served()
    with served:
        model = str(served.model)
        run_load(served.url, model, requests=4, concurrency=2, output_lengths=(8,), seed=1)
        with Lateness() as lateness:
            seen = run_load(served.url, model, requests=requests, concurrency=concurrency)
    records = {record.trace_id.hex(): record for record in served.records()}
    served.remove()
    failed = [one.error for one in seen if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(seen)} requests failed: {failed[0]}")
    pairs = [(one, records[one.trace_id]) for one in seen if one.trace_id in records]
    return _lines(pairs, len(seen) - len(pairs), lateness)


class Lateness:
    """How late a thread of this process wakes up, while `with` lasts."""

    def __enter__(self) -> Lateness:
        self.ms: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            time.sleep(TICK_S)
            self.ms.append((time.perf_counter() - began - TICK_S) * 1000)

    @property
    def control(self) -> Control:
        """Whether the client got the CPU when it wanted it."""
        late = float(np.percentile(self.ms, 95))
        return Control(f"client late {late:.1f} ms", late <= LATE_MS)


def _lines(pairs: list[tuple[Any, RequestRecord]], missing: int, lateness: Lateness) -> list[Line]:
    lost = exactly(float(missing))
    found = [line("truth: requests without a trace", "", lost, Gate(0), note=f"of {len(pairs) + missing}")]
    clients = np.array([(one.ttft_ns, one.e2e_ns) for one, _ in pairs]) / 1e6
    ours = np.array([(record.ttft_ns, record.duration_ns) for _, record in pairs]) / 1e6
    for column, name in enumerate(("TTFT", "E2E")):
        found += _latency(name, clients[:, column], ours[:, column], lateness.control)
    gaps = [(np.array(one.gaps_ns), record.gaps_ns()) for one, record in pairs if record.steps is not None]
    return [*found, _itl([client for client, _ in gaps], [our for _, our in gaps], lateness.control)]


def _latency(name: str, client: Any, ours: Any, control: Control) -> list[Line]:
    """Client − ours, ms."""
    difference = client - ours
    middle = bootstrapped(len(difference), lambda rows: float(np.median(difference[rows])))
    size = np.abs(difference)
    # Which of the two bounds applies is decided request by request: 15 ms, or 5 % where that is more.
    allowed = np.maximum(P95_MS, client * SHARE / 100)
    used = bootstrapped(len(size), lambda rows: float(np.percentile((size / allowed)[rows], 95)) * 100)
    note = f"client p50 {np.median(client):.1f} ms, ours {np.median(ours):.1f} ms; differences {_spread(difference)}"
    return [
        line(
            f"truth: {name}, client − ours, median, upper side", "ms", middle, Gate(MEDIAN_MS), control, note
        ),
        line(
            f"truth: {name}, client − ours, median, lower side", "ms", middle, Gate(0, at_least=True), control
        ),
        line(
            f"truth: {name}, p95 of |client − ours| of what is allowed (15 ms or 5 %)",
            "%",
            used,
            Gate(100),
            control,
        ),
    ]


def _itl(client: list[Any], ours: list[Any], control: Control) -> Line:
    def off(rows: Any) -> float:
        return (verdict.pooled(client, rows, 50) / verdict.pooled(ours, rows, 50) - 1) * 100

    signed = bootstrapped(len(client), off)
    size = Figure(abs(signed.value), 0.0, max(abs(signed.low), abs(signed.high)))
    everybody = range(len(client))
    medians = verdict.pooled(client, everybody, 50) / 1e6, verdict.pooled(ours, everybody, 50) / 1e6
    note = f"client {medians[0]:.3f} ms, ours {medians[1]:.3f} ms, signed {signed.value:+.2f} %"
    return line("truth: ITL p50, |client − ours|", "%", size, Gate(SHARE), control, note)


def _spread(values: Any) -> str:
    return ", ".join(f"p{percent} {np.percentile(values, percent):+.2f}" for percent in (5, 50, 95)) + " ms"


def main() -> int:
    """The command line."""
    from benchmarks.__main__ import show

    parser = argparse.ArgumentParser(prog="benchmarks/truth.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--client", choices=("ours", "guidellm", "aiperf"), default="ours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--report", action="store_true", help="exit 0 also if a gate failed")
    arguments = parser.parse_args()
    before = machine.load()
    if arguments.client == "ours":
        lines = own_client(arguments.requests, arguments.concurrency)
    else:
        from benchmarks import clients

        lines = clients.compared(arguments.client, arguments.requests, arguments.concurrency)
    about = {**machine.described(), "load average": f"{before:.2f} to {machine.load():.2f}"}
    show(lines, about)
    if arguments.json:
        verdict.saved(lines, arguments.json, about)
    return int(any(one.verdict == verdict.FAIL for one in lines) and not arguments.report)


if __name__ == "__main__":
    sys.exit(main())
