"""Compares the latencies that a client measured with those of the trace, request by request.

    python benchmarks/truth.py [--requests N] [--concurrency N] [--client ours|guidellm|aiperf] [--json FILE] [--report]

Our client shares no code with otel_infer and sends a `traceparent`, so each request is compared with its own trace.
Servers whose requests wait before they are read are measured by `blocked_truth`. GuideLLM and AIPerf send none, so distributions are compared. The control is the delay with which a thread of the client
wakes up.
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
from benchmarks.verdict import Control, Figure, Gate, Line, bootstrap_figure, make_exact, make_line
from otel_infer.assembly.records.request import RequestRecord

REQUESTS, CONCURRENCY = 240, 8
MEDIAN_MS, P95_MS, SHARE = 5.0, 15.0, 5.0
"""Gates: the median difference is 0 to 5 ms, the 95th percentile of its size is at most 15 ms or 5 %, and the median
gap between tokens differs by at most 5 %."""
MAX_LATE_MS = 5.0
TICK_S = 0.002


def measure(quick: bool) -> list[Line]:
    """Returns the rows of the table."""
    return measure_own_client(24 if quick else REQUESTS, 4 if quick else CONCURRENCY)


def measure_own_client(requests: int, concurrency: int) -> list[Line]:
    """Compares our client with the traces, request by request."""
    from otel_infer.cli.demo.load_client import run_load

    served = Served()
    with served:
        model = str(served.model)
        run_load(served.url, model, requests=4, concurrency=2, output_lengths=(8,), seed=1)
        with Lateness() as lateness:
            requests_sent = run_load(served.url, model, requests=requests, concurrency=concurrency)
    records = {record.trace_id.hex(): record for record in served.read_records()}
    served.remove_files()
    failed = [sent.error for sent in requests_sent if sent.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(requests_sent)} requests failed: {failed[0]}")
    pairs = [(sent, records[sent.trace_id]) for sent in requests_sent if sent.trace_id in records]
    return _make_lines(pairs, len(requests_sent) - len(pairs), lateness)


class Lateness:
    """Measures the delay of a periodic wake-up in this process."""

    def __enter__(self) -> Lateness:
        self.ms: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure_delays, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _measure_delays(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            time.sleep(TICK_S)
            self.ms.append((time.perf_counter() - began - TICK_S) * 1000)

    @property
    def control(self) -> Control:
        """Whether the client got the CPU in time."""
        late = float(np.percentile(self.ms, 95))
        return Control(f"client late {late:.1f} ms", late <= MAX_LATE_MS)


def compare_percentile(title: str, pairs: Any, percent: int, lateness: Lateness) -> Line:
    """Returns a row: the difference of a percentile, as a share of 5 ms or 5 %, whichever is larger.

    `pairs`: rows of the client's latency and ours, ms.
    """

    def share(rows: Any) -> float:
        client, ours = np.percentile(pairs[rows], percent, axis=0)
        return float(abs(client - ours) / max(MEDIAN_MS, client * SHARE / 100) * 100)

    client, ours = np.percentile(pairs, percent, axis=0)
    return make_line(
        f"{title}: p{percent}, |client − ours| as a share of 5 ms or 5 %", "%",
        bootstrap_figure(len(pairs), share), Gate(100), lateness.control,
        f"client {client:.1f} ms, ours {ours:.1f} ms",
    )  # fmt: skip


def _make_lines(pairs: list[tuple[Any, RequestRecord]], missing: int, lateness: Lateness) -> list[Line]:
    lost = make_exact(float(missing))
    lines = [
        make_line("truth: requests without a trace", "", lost, Gate(0), note=f"of {len(pairs) + missing}")
    ]
    clients = np.array([(sent.ttft_ns, sent.e2e_ns) for sent, _ in pairs]) / 1e6
    ours = np.array([(record.ttft_ns, record.duration_ns) for _, record in pairs]) / 1e6
    for column, name in enumerate(("TTFT", "E2E")):
        lines += _make_latency_lines(name, clients[:, column], ours[:, column], lateness.control)
    gaps = [(np.array(sent.gaps_ns), record.gaps_ns()) for sent, record in pairs if record.steps is not None]
    return [
        *lines,
        _make_itl_line([client for client, _ in gaps], [our for _, our in gaps], lateness.control),
    ]


def _make_latency_lines(name: str, client: Any, ours: Any, control: Control) -> list[Line]:
    """Returns the rows of one latency; client − ours, ms."""
    difference = client - ours
    middle = bootstrap_figure(len(difference), lambda rows: float(np.median(difference[rows])))
    size = np.abs(difference)
    # The bound of each request is 15 ms or 5 %, whichever is larger.
    allowed = np.maximum(P95_MS, client * SHARE / 100)
    used = bootstrap_figure(len(size), lambda rows: float(np.percentile((size / allowed)[rows], 95)) * 100)
    note = f"client p50 {np.median(client):.1f} ms, ours {np.median(ours):.1f} ms; differences {_format_spread(difference)}"
    return [
        make_line(
            f"truth: {name}, client − ours, median, upper side", "ms", middle, Gate(MEDIAN_MS), control, note
        ),
        make_line(
            f"truth: {name}, client − ours, median, lower side", "ms", middle, Gate(0, at_least=True), control
        ),
        make_line(
            f"truth: {name}, p95 of |client − ours| as a share of 15 ms or 5 %",
            "%",
            used,
            Gate(100),
            control,
        ),
    ]


def _make_itl_line(client: list[Any], ours: list[Any], control: Control) -> Line:
    def compare_medians(rows: Any) -> float:
        return (verdict.pool_percentile(client, rows, 50) / verdict.pool_percentile(ours, rows, 50) - 1) * 100

    signed = bootstrap_figure(len(client), compare_medians)
    size = Figure(abs(signed.value), 0.0, max(abs(signed.low), abs(signed.high)))
    all_requests = range(len(client))
    medians = (
        verdict.pool_percentile(client, all_requests, 50) / 1e6,
        verdict.pool_percentile(ours, all_requests, 50) / 1e6,
    )
    note = f"client {medians[0]:.3f} ms, ours {medians[1]:.3f} ms, signed {signed.value:+.2f} %"
    return make_line("truth: ITL p50, |client − ours|", "%", size, Gate(SHARE), control, note)


def _format_spread(values: Any) -> str:
    return ", ".join(f"p{percent} {np.percentile(values, percent):+.2f}" for percent in (5, 50, 95)) + " ms"


def main() -> int:
    """Runs the command line."""
    from benchmarks.__main__ import show_lines

    parser = argparse.ArgumentParser(prog="benchmarks/truth.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--client", choices=("ours", "guidellm", "aiperf"), default="ours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--report", action="store_true", help="exit 0 also if a gate failed")
    arguments = parser.parse_args()
    before = machine.read_load()
    if arguments.client == "ours":
        lines = measure_own_client(arguments.requests, arguments.concurrency)
    else:
        from benchmarks import clients

        lines = clients.compare_client(arguments.client, arguments.requests, arguments.concurrency)
    environment = {**machine.describe_machine(), "load average": f"{before:.2f} to {machine.read_load():.2f}"}
    show_lines(lines, environment)
    if arguments.json:
        verdict.save_lines(lines, arguments.json, environment)
    return int(any(line.verdict == verdict.FAIL for line in lines) and not arguments.report)


if __name__ == "__main__":
    sys.exit(main())
