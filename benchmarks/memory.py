"""A million short requests through the real sidecar: whether it, or the server, holds more for every one of them.

Requests come in batches of a few steps. They bring values from outside that no other has (callers, attributes, types of
errors), some fail and some are aborted: what is remembered by such a value would grow. Memory is what a process has for itself
alone; it is read when everything that was offered has been sent, so that what is on its way is not in it. What is filled once
and kept full from then on is the warm-up, and is left out: the step log, and the flight recorder's window, which takes longest.

Pages that are free come and go in a rhythm of their own: protobuf (upb) has glibc give them back after so much was freed, which is at
every fifth collection of metrics. What is held is what is left then: a sample is the least of the readings, one after each round, of
the last minute. The most of all readings is told beside it.
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
from benchmarks.slope import Slope, slope
from benchmarks.verdict import FAIL, INCONCLUSIVE, PASS, Control, Figure, Gate, Line, exactly, line
from otel_infer import _clock, semconv
from otel_infer.assembly.engine.step_table import CAPACITY
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.sidecar.recording.window import WINDOW_NS
from otel_infer.tracing import start

REQUESTS, QUICK = 1_000_000, 20_000
SAMPLES, QUICK_SAMPLES = 100, 20
BATCH, STEPS, PROMPT = 32, 3, 64
AT_ONCE, EVERY_S = 640, 1.28
"""So many requests, then it is waited until they are read, and until it is time for the next ones: they fit into the ring,
whatever the sidecar is held up by."""
STEPS_AT_ONCE = 4096
RATE_LIMIT = 0.05
"""How much more or less was offered in the second half, as a share: the flight recorder holds the facts of two minutes, so
memory follows the rate."""
WARM_S = WINDOW_NS / 1e9 * 2
"""The window fills, and then lies once where it lay before."""
FLOOR_S = 64.0
"""Longer than protobuf goes without giving free pages back at this rate, 50 s."""
MOST_MB_PER_H = 1.0
RESOLUTION = 65536
"""Bytes that memory may differ by for no reason, since allocators take and give pages as they like: on both sides of the
interval. A leak of 32 bytes in one request out of 500 is as much."""


class Series:
    """Memory of two processes over time. `begun`: from which sample on it counts. `most`: bytes of each at any time."""

    def __init__(self) -> None:
        self.at, self.requests = array("d"), array("d")
        self.sidecar, self.server = array("d"), array("d")
        self.begun = 0
        self.most = (0, 0)
        self._readings: deque[tuple[float, int, int]] = deque()

    def read(self, at: float, sidecar: int, server: int) -> None:
        """One reading; `at` in s since the first request."""
        self._readings.append((at, sidecar, server))
        while self._readings[0][0] < at - FLOOR_S:
            self._readings.popleft()
        self.most = max(self.most[0], sidecar), max(self.most[1], server)

    def floor(self) -> tuple[int, int]:
        """The least of the last readings, of each process."""
        return min(one[1] for one in self._readings), min(one[2] for one in self._readings)

    def note(self, at: float, requests: int, sidecar: float, server: float) -> None:
        """One sample; `at` in s since the first request."""
        self.at.append(at)
        self.requests.append(requests)
        self.sidecar.append(sidecar)
        self.server.append(server)
        if at < WARM_S:
            self.begun = len(self.at)


def measure(quick: bool) -> list[Line]:
    """Offers them about as fast as the ring takes them; whenever memory is read, nothing is on its way."""
    wanted, samples = (QUICK, QUICK_SAMPLES) if quick else (REQUESTS, SAMPLES)
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        with Exporting(receiver.endpoint, steps="auto") as exporting:
            series, load, spans = Series(), Load(), 0
            load.fill_step_log(exporting.flush)
            began = due = time.perf_counter()
            for sample in range(1, samples + 1):
                while load.ended < wanted * sample // samples:
                    load.offer(AT_ONCE)
                    exporting.flush()
                    due = max(due + EVERY_S, time.perf_counter())
                    time.sleep(max(due - time.perf_counter(), 0))
                    now = time.perf_counter() - began
                    series.read(now, machine.own_memory(exporting.pid), machine.own_memory(os.getpid()))
                arrived = receiver.counted()
                spans += arrived["spans"]
                series.note(time.perf_counter() - began, load.ended, *series.floor())
            counted = arrived["metrics"]
    return lines_of(series, load.ended, counted, spans)


def lines_of(series: Series, ended: int, counted: dict[str, dict[str, float]], spans: int) -> list[Line]:
    """The rows: whether all of them arrived, and what they left in memory."""
    lost = {reason: int(count) for reason, count in counted[semconv.SELF_LOST.name].items() if count}
    lost.pop("steps_over_budget", None)  # these were not to be exported
    seen = int(sum(counted[semconv.REQUEST_DURATION.name].values()))
    note = f"{ended:,} offered, {seen:,} counted, {spans:,} spans arrived; lost: {lost or 'nothing'}"
    missing = exactly(ended - seen + sum(lost.values()))
    rows = [line("memory: requests, facts and spans lost", "", missing, Gate(0), note=note)]
    begun = series.begun
    warm = settled(series) if not missing.value else Control("some were lost", False)
    for process, column, most in zip(("sidecar", "server"), (series.sidecar, series.server), series.most):
        rows += grown(process, series.at[begun:], series.requests[begun:], column[begun:], most, warm)
    return rows


def grown(
    process: str,
    at: Sequence[float],
    requests: Sequence[float],
    held: Sequence[float],
    most: float,
    warm: Control,
) -> list[Line]:
    """Of one process, by time at this rate, and by requests; `held` and `most` in bytes."""
    by_time = resolved(slope(at, held), at).scaled(3600 / 1e6)
    by_request = resolved(slope(requests, held), requests)
    rate = (requests[-1] - requests[0]) / (at[-1] - at[0]) if len(at) > 1 else 0.0
    fifths = " ".join(f"{np.median(part) / 1e6:.1f}" for part in np.array_split(held, 5) if len(part))
    note = f"two-sided bounds; {len(at)} samples at {rate:,.0f} requests/s, at most {most / 1e6:.1f} MB; held by fifths {fifths}"
    gate = f"≤ {MOST_MB_PER_H:.0f} MB/h, bounds around 0"
    claim = f"memory: growth of the {process}"
    judged = verdict_of(by_time, warm)
    return [
        Line(f"{claim} at this rate", "MB/h", *by_time, gate, warm.said, judged, note),
        line(f"{claim} per million requests", "MB", Figure(*by_request)),
    ]


def resolved(found: Slope, x: Sequence[float]) -> Slope:
    """With what cannot be told apart over the whole of it."""
    reach = RESOLUTION / (x[-1] - x[0]) if len(x) > 1 else 0.0
    return Slope(found.value, found.low - reach, found.high + reach)


def settled(series: Series) -> Control:
    """Half of the samples are from after the warm-up, and the rate was the same throughout."""
    at, requests = series.at[series.begun :], series.requests[series.begun :]
    if len(at) < SAMPLES // 2:
        return Control(f"too short: {WARM_S:.0f} s are warm-up", False)
    rate = rate_change(at, requests)
    return Control(f"after {WARM_S:.0f} s, rate {100 * rate:+.1f} %", abs(rate) <= RATE_LIMIT)


def rate_change(at: Sequence[float], requests: Sequence[float]) -> float:
    """How much faster they came in the second half than in the first, as a share."""
    middle = len(at) // 2
    first, second = (
        (requests[last] - requests[begin]) / (at[last] - at[begin])
        for begin, last in ((0, middle), (middle, len(at) - 1))
    )
    return second / first - 1


def verdict_of(found: Slope, warm: Control) -> str:
    """Growth that is beyond doubt fails, however slow. What falls has not settled yet, and says nothing."""
    if not warm.holds or np.isnan(found.value):
        return INCONCLUSIVE
    if found.low > 0:
        return FAIL
    return PASS if found.value <= MOST_MB_PER_H and found.high >= 0 else INCONCLUSIVE


class Load:
    """A server whose requests take `STEPS` steps, `BATCH` of them together. `ended`: how many there were."""

    def __init__(self) -> None:
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            raise RuntimeError("no step log to be had")
        self._log: BatchWriter = log
        self._log.pack_handles = lambda members: b"".join(member.packed for member in members)
        self._prompts = np.full(BATCH, PROMPT, np.uint32).tobytes()
        self._left: list[Any] = []
        self.ended = 0

    def offer(self, count: int) -> None:
        """So many more, as fast as it goes."""
        for _ in range(count // BATCH):
            self._batch()

    def fill_step_log(self, flush: Callable[[], None]) -> None:
        """The sidecar remembers so many steps, and takes the memory for them as they come."""
        request = self._arrived(0)
        for number in range(CAPACITY):
            self._log.write_done(self._log.write_scheduled([request], (), b"", 0, 0, 1, 0), b"", 1)
            if number % STEPS_AT_ONCE == 0:
                flush()
        request.close()
        self._left = [request]
        self.ended += 1

    def _batch(self) -> None:
        members = [self._arrived(self.ended + number) for number in range(BATCH)]
        for step in range(STEPS):
            tokens = b"" if step else self._prompts
            number = self._log.write_scheduled(members, self._left, tokens, 0, 0, BATCH, 0)
            self._left = []
            self._log.write_done(number, b"", BATCH)
        for member in members:
            self._end(member, self.ended)
            self.ended += 1
        self._left = members

    def _arrived(self, number: int) -> Any:
        """One in two comes from a caller, and one in eight of those does not sample."""
        token = context.attach(_caller(number)) if number % 2 else None
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

    def _end(self, request: Any, number: int) -> None:
        if number % 100 == 1:
            return request.close(events.ERROR, f"Error{number}")
        if number % 100 == 2:
            return request.close(events.ABORTED, semconv.ERROR_CLIENT_DISCONNECT)
        request.record_event(events.EngineFinished(_clock.now(), "length", STEPS))
        return request.close()


def _caller(number: int) -> Context:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if number % 16 != 1 else 0)
    caller = trace.SpanContext((number + 1) << 64 | 1, number + 1, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(caller))
