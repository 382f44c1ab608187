"""Sends a million short requests through the real sidecar, and measures the growth of its memory and of the server's.

Requests have distinct callers, attributes and error types; some fail or are aborted. Memory is the private memory of a process, read
when everything offered was sent. The warm-up, in which the step log and the flight recorder's window fill up once, is excluded.

Free pages come and go periodically: protobuf (upb) makes glibc return them at every fifth collection of metrics. So a sample is the
minimum of the readings of the last minute, with one reading per round. The maximum of all readings is in the note.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from opentelemetry import context, trace
from opentelemetry.context import Context

from benchmarks import machine
from benchmarks.ours import ENGINE, MODEL, Exporting
from benchmarks.receiver import Receiver
from benchmarks.slope import Slope, fit_slope
from benchmarks.verdict import FAIL, INCONCLUSIVE, PASS, Control, Gate, Line, make_exact, make_line
from otel_infer import _clock, semconv
from otel_infer.assembly.engine.step_table import CAPACITY
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.sidecar.recording.window import WINDOW_NS
from otel_infer.tracing import start

REQUESTS, QUICK_REQUESTS = 1_000_000, 20_000
SAMPLES, QUICK_SAMPLES = 100, 20
BATCH, STEPS, PROMPT = 32, 3, 64
ROUND_REQUESTS, ROUND_S = 640, 1.28
"""Requests per round, and its least duration. They fit into the ring, however long the sidecar is delayed."""
STEPS_PER_FLUSH = 4096
MAX_RATE_CHANGE = 0.05
"""Largest change of the rate in the second half, as a share. The flight recorder holds the events of two minutes, so memory follows
the rate."""
WARM_UP_S = WINDOW_NS / 1e9 * 2
"""The window fills up, and then its first place is used again."""
MINIMUM_S = 64.0
"""Longer than the period of protobuf's free pages at this rate, 50 s."""
MAX_MB_PER_H = 1.0
RESOLUTION = 65536
"""Bytes by which the allocators' page use may differ at both ends of the interval. A leak of 32 bytes in one request of 500 is as much."""


class Series:
    """Memory of two processes over time. `first`: the first sample after the warm-up. `peaks`: largest readings (bytes)."""

    def __init__(self) -> None:
        self.at, self.requests = array("d"), array("d")
        self.sidecar, self.server = array("d"), array("d")
        self.first = 0
        self.peaks = (0, 0)
        self._readings: deque[tuple[float, int, int]] = deque()

    def add_reading(self, at: float, sidecar: int, server: int) -> None:
        """Adds one reading; `at` in s since the first request."""
        self._readings.append((at, sidecar, server))
        while self._readings[0][0] < at - MINIMUM_S:
            self._readings.popleft()
        self.peaks = max(self.peaks[0], sidecar), max(self.peaks[1], server)

    def find_minimum(self) -> tuple[int, int]:
        """Returns the minimum of the last readings of each process."""
        return min(reading[1] for reading in self._readings), min(reading[2] for reading in self._readings)

    def add_sample(self, at: float, requests: int, sidecar: float, server: float) -> None:
        """Adds one sample; `at` in s since the first request."""
        self.at.append(at)
        self.requests.append(requests)
        self.sidecar.append(sidecar)
        self.server.append(server)
        if at < WARM_UP_S:
            self.first = len(self.at)


def measure(quick: bool) -> list[Line]:
    """Offers requests in rounds. Memory is read after each round, when everything was sent."""
    wanted, samples = (QUICK_REQUESTS, QUICK_SAMPLES) if quick else (REQUESTS, SAMPLES)
    with Receiver() as receiver:
        _, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        with Exporting(receiver.endpoint, steps="auto") as exporting:
            series, load, spans = Series(), Load(), 0
            load.fill_step_log(exporting.flush)
            began = due = time.perf_counter()
            for sample in range(1, samples + 1):
                while load.ended < wanted * sample // samples:
                    load.offer_requests(ROUND_REQUESTS)
                    exporting.flush()
                    due = max(due + ROUND_S, time.perf_counter())
                    time.sleep(max(due - time.perf_counter(), 0))
                    series.add_reading(
                        time.perf_counter() - began,
                        machine.read_private_memory(exporting.pid),
                        machine.read_private_memory(os.getpid()),
                    )
                counts = receiver.read_counts()
                spans += counts["spans"]
                series.add_sample(time.perf_counter() - began, load.ended, *series.find_minimum())
            metrics = counts["metrics"]
    return make_lines(series, load.ended, metrics, spans)


def make_lines(series: Series, ended: int, metrics: dict[str, dict[str, float]], spans: int) -> list[Line]:
    """Returns the rows: whether all requests arrived, and the growth of both processes."""
    lost = {reason: int(count) for reason, count in metrics[semconv.SELF_LOST.name].items() if count}
    lost.pop("steps_over_budget", None)  # these were not to be exported
    counted = int(sum(metrics[semconv.REQUEST_DURATION.name].values()))
    note = f"{ended:,} offered, {counted:,} counted, {spans:,} spans arrived; lost: {lost or 'nothing'}"
    missing = make_exact(ended - counted + sum(lost.values()))
    lines = [make_line("memory: requests, events and spans lost", "", missing, Gate(0), note=note)]
    warm = Control("some were lost", False) if missing.value else check_warm_up(series)
    for process, column, peak in zip(("sidecar", "server"), (series.sidecar, series.server), series.peaks):
        lines.append(_make_growth_line(process, series, column[series.first :], peak, warm))
    return lines


def _make_growth_line(
    process: str, series: Series, memory: Sequence[float], peak: float, warm: Control
) -> Line:
    """Returns the row of one process; `memory` and `peak` in bytes."""
    at, requests = series.at[series.first :], series.requests[series.first :]
    growth = add_resolution(fit_slope(at, memory), at).scale_by(3600 / 1e6)
    rate = (requests[-1] - requests[0]) / (at[-1] - at[0]) if len(at) > 1 else 0.0
    fifths = " ".join(f"{np.median(part) / 1e6:.1f}" for part in np.array_split(memory, 5) if len(part))
    note = (
        f"two-sided bounds; {len(at)} samples at {rate:,.0f} requests/s, at most {peak / 1e6:.1f} MB; "
        f"fifths of the run {fifths} MB"
    )
    gate = f"≤ {MAX_MB_PER_H:.0f} MB/h, bounds around 0"
    claim = f"memory: growth of the {process} at this rate"
    return Line(claim, "MB/h", *growth, gate, warm.text, judge_growth(growth, warm), note)


def add_resolution(slope: Slope, x: Sequence[float]) -> Slope:
    """Widens the interval by the resolution over the whole run."""
    reach = RESOLUTION / (x[-1] - x[0]) if len(x) > 1 else 0.0
    return Slope(slope.value, slope.low - reach, slope.high + reach)


def check_warm_up(series: Series) -> Control:
    """Returns whether half of the samples follow the warm-up, and the rate was constant."""
    at, requests = series.at[series.first :], series.requests[series.first :]
    if len(at) < SAMPLES // 2:
        return Control(f"too short: the warm-up takes {WARM_UP_S:.0f} s", False)
    change = compute_rate_change(at, requests)
    return Control(f"after {WARM_UP_S:.0f} s, rate {100 * change:+.1f} %", abs(change) <= MAX_RATE_CHANGE)


def compute_rate_change(at: Sequence[float], requests: Sequence[float]) -> float:
    """Returns the change of the rate from the first half to the second, as a share."""
    middle = len(at) // 2
    first, second = (
        (requests[last] - requests[begin]) / (at[last] - at[begin])
        for begin, last in ((0, middle), (middle, len(at) - 1))
    )
    return second / first - 1


def judge_growth(growth: Slope, warm: Control) -> str:
    """Returns the verdict. Significant growth fails at any rate; a decrease is inconclusive, because the run has not settled."""
    if not warm.holds or np.isnan(growth.value):
        return INCONCLUSIVE
    if growth.low > 0:
        return FAIL
    return PASS if growth.value <= MAX_MB_PER_H and growth.high >= 0 else INCONCLUSIVE


class Load:
    """A server whose requests take `STEPS` steps in batches of `BATCH`. `ended`: requests so far."""

    def __init__(self) -> None:
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            raise RuntimeError("no step log is available")
        self._log: BatchWriter = log
        self._log.pack_handles = lambda members: b"".join(member.packed for member in members)
        self._prompts = np.full(BATCH, PROMPT, np.uint32).tobytes()
        self._left: list[Any] = []
        self.ended = 0

    def offer_requests(self, count: int) -> None:
        """Runs this many requests without pauses."""
        for _ in range(count // BATCH):
            self._run_batch()

    def fill_step_log(self, flush: Callable[[], None]) -> None:
        """Fills the sidecar's step table, which grows until it is full."""
        request = self._start_request(0)
        for number in range(CAPACITY):
            self._log.write_done(self._log.write_scheduled([request], (), b"", 0, 0, 1, 0), b"", 1)
            if number % STEPS_PER_FLUSH == 0:
                flush()
        request.close()
        self._left = [request]
        self.ended += 1

    def _run_batch(self) -> None:
        members = [self._start_request(self.ended + number) for number in range(BATCH)]
        for step in range(STEPS):
            tokens = b"" if step else self._prompts
            number = self._log.write_scheduled(members, self._left, tokens, 0, 0, BATCH, 0)
            self._left = []
            self._log.write_done(number, b"", BATCH)
        for member in members:
            self._end_request(member, self.ended)
            self.ended += 1
        self._left = members

    def _start_request(self, number: int) -> Any:
        """Starts a request. Every second one has a remote caller, and one in eight of those does not sample."""
        token = context.attach(_make_caller(number)) if number % 2 else None
        request: Any = start.open_request(
            f"chat {MODEL}", owner=ENGINE, operation="chat", provider=ENGINE, model=MODEL
        )
        if token is not None:
            context.detach(token)
        if number % 8 == 0:
            request.set_attribute("number", number)
            request.set_attribute("name", f"request {number}")
        request.record_submitted(ENGINE, 1, PROMPT, STEPS)
        request.record_event(events.RequestReceived(_clock.now()))
        return request

    def _end_request(self, request: Any, number: int) -> None:
        if number % 100 == 1:
            return request.close(events.ERROR, f"Error{number}")
        if number % 100 == 2:
            return request.close(events.ABORTED, semconv.ERROR_CLIENT_DISCONNECT)
        request.record_event(events.EngineFinished(_clock.now(), "length", STEPS))
        return request.close()


def _make_caller(number: int) -> Context:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if number % 16 != 1 else 0)
    caller = trace.SpanContext((number + 1) << 64 | 1, number + 1, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(caller))
