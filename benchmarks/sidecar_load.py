"""Measures the CPU time of the sidecar at ordinary load, where its wake-ups cost more than its data.

A paced server without a model writes the events of its requests through the real recorder. The real sidecar sends to a receiver.
The figure is the CPU time of the sidecar's process after its start-up, as a share of one core.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.ours import ENGINE, MODEL, Exporting
from benchmarks.receiver import Receiver
from benchmarks.verdict import Control, Gate, Line, estimate_median, make_line
from otel_infer import _clock, semconv
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

PARTS, PART_S = 5, 20.0
QUICK_PARTS, QUICK_PART_S = 2, 3.0
WARM_UP_S, QUICK_WARM_UP_S = 15.0, 2.0
"""Time for the first exports, which import code and fill the sidecar's tables."""
PROMPT = 64
STEP_SHARE = 0.75
"""Share of a step's interval in which its batch is in the model."""
FORWARD_TICKS, QUEUE_TICKS = 2, 1
"""How long a short request is in the model and in the queue before it, in intervals between two requests."""
_HTTP = events.HTTP_CODES["POST", "http"]


class OrdinaryLoad(NamedTuple):
    """Requests per second, and steps per second of a batch in which each request gets `tokens` tokens; 0 = no steps."""

    claim: str
    gate: float
    """Largest share of one core, %."""
    steps: str
    """OTEL_INFER_STEPS."""
    requests_per_s: int = 0
    steps_per_s: int = 0
    tokens: int = 0


LOADS = (
    OrdinaryLoad("idle", 0.1, "auto"),
    OrdinaryLoad("10 requests/s, 300 step spans/s, every step", 1.0, "all", 10, 50, 30),
    OrdinaryLoad("200 requests/s with a queue and a forward", 1.0, "auto", 200),
    OrdinaryLoad("15 requests/s of 100 tokens, 50 steps/s", 1.0, "auto", 15, 50, 100),
)


class LoadPart(NamedTuple):
    """One interval of load: the sidecar's share of a core, and how often its threads slept, per second."""

    share: float
    wakes: float


class SteppingServer:
    """A server with continuous batching: all requests are members of its steps. `offered`: so far."""

    def __init__(self, load: OrdinaryLoad) -> None:
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            raise RuntimeError("no step log is available")
        self._log: BatchWriter = log
        self._log.pack_handles = lambda members: b"".join([member.packed for member in members])
        self._tokens, self._pace = load.tokens, load.requests_per_s / load.steps_per_s
        self.interval = 1 / load.steps_per_s
        self._members: list[Any] = []
        self._left: list[Any] = []
        self._ends_at: deque[int] = deque()
        self._number, self._due = 0, 0.0
        self.offered = 0

    def tick(self) -> None:
        """Runs one step, in which due requests join and finished ones leave."""
        self._due += self._pace
        joined = [_open_request() for _ in range(int(self._due))]
        self._due -= len(joined)
        for request in joined:
            request.record_submitted(ENGINE, 1, PROMPT, self._tokens)
            request.record_event(events.RequestReceived(_clock.now()))
            self._ends_at.append(self._number + self._tokens)
        self.offered += len(joined)
        self._members += joined
        self._number += 1
        if not self._members:
            return
        size, prompts = len(self._members), [(request, PROMPT) for request in joined]
        step = self._log.write_scheduled(self._members, self._left, b"", 0, 0, size, 0, prompts)
        time.sleep(self.interval * STEP_SHARE)
        self._log.write_done(step, b"", size)
        self._left = []
        while self._ends_at and self._ends_at[0] <= self._number:
            self._ends_at.popleft()
            self._left.append(self._finish_request(self._members.pop(0)))

    def close(self) -> None:
        """Ends the requests in flight."""
        for request in self._members:
            self._finish_request(request)
        recorder.release_batch_writer(ENGINE, self._log)

    def _finish_request(self, request: Any) -> Any:
        request.record_token_reached()
        request.record_event(events.EngineFinished(_clock.now(), "length", self._tokens))
        request.close(status_code=200, http=_HTTP, route="/v1/chat/completions")
        return request


class ShortServer:
    """A server whose requests wait for a batch and then run one forward pass. `offered`: so far."""

    def __init__(self, load: OrdinaryLoad) -> None:
        self.interval = 1 / load.requests_per_s
        self._running: deque[tuple[Any, int, int]] = deque()
        self.offered = 0

    def tick(self) -> None:
        """Opens one request, and ends the request whose forward pass is over."""
        now = _clock.now()
        queued_until = now + int(self.interval * 1e9 * QUEUE_TICKS)
        self._running.append((_open_request(), now, queued_until))
        self.offered += 1
        if len(self._running) > QUEUE_TICKS + FORWARD_TICKS:
            self._end_request(*self._running.popleft())

    def close(self) -> None:
        """Ends the requests in flight."""
        while self._running:
            self._end_request(*self._running.popleft())

    def _end_request(self, request: Any, queued_at: int, started_at: int) -> None:
        request.record_event(events.StageEnded(started_at, queued_at, "queue", 0))
        request.record_stage(events.FORWARD, started_at, 1)
        request.close(status_code=200, http=_HTTP, route="/embed")


class IdleServer:
    """A server with an engine thread and without requests, except the one that makes its rings."""

    interval, offered = 1.0, 1

    def __init__(self, load: OrdinaryLoad) -> None:
        recorder.acquire_batch_writer(ENGINE)
        _open_request().close(status_code=200, http=_HTTP, route="/embed")

    def tick(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Has nothing to end."""


def make_server(load: OrdinaryLoad) -> SteppingServer | ShortServer | IdleServer:
    """Returns the server of this load."""
    if load.steps_per_s:
        return SteppingServer(load)
    return ShortServer(load) if load.requests_per_s else IdleServer(load)


def measure(quick: bool) -> list[Line]:
    """Measures each load with a sidecar of its own."""
    lines: list[Line] = []
    with Receiver() as receiver:
        _, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        for load in LOADS:
            lines += measure_load(load, receiver, quick)
    return lines


def measure_load(load: OrdinaryLoad, receiver: Receiver, quick: bool) -> list[Line]:
    """Returns the row of one load, and the requests that did not arrive."""
    parts, seconds = (QUICK_PARTS, QUICK_PART_S) if quick else (PARTS, PART_S)
    with Exporting(receiver.endpoint, steps=load.steps) as exporting:
        server = make_server(load)
        run_paced(server, QUICK_WARM_UP_S if quick else WARM_UP_S)
        measured = [measure_part(server, exporting.pid, seconds) for _ in range(parts)]
        server.close()
        exporting.flush()
    return make_lines(load, measured, server.offered, receiver.read_counts())


def measure_part(server: Any, pid: int, seconds: float) -> LoadPart:
    """Returns the sidecar's CPU time and wake-ups during one interval of load."""
    began, cpu, wakes = time.perf_counter(), machine.read_cpu_ns(pid), count_wakes(pid)
    run_paced(server, seconds)
    lasted = time.perf_counter() - began
    return LoadPart(
        (machine.read_cpu_ns(pid) - cpu) / lasted / 1e9 * 100, (count_wakes(pid) - wakes) / lasted
    )


def run_paced(server: Any, seconds: float) -> None:
    """Runs the server's ticks at its interval; delays are not caught up on."""
    due = time.perf_counter()
    until = due + seconds
    while due < until:
        server.tick()
        due = max(due + server.interval, time.perf_counter())
        time.sleep(max(due - time.perf_counter(), 0))


def count_wakes(pid: int) -> int:
    """Returns how often the threads of a process gave up their core voluntarily so far."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return total


def make_lines(load: OrdinaryLoad, parts: list[LoadPart], offered: int, counts: dict[str, Any]) -> list[Line]:
    """Returns the rows of one load."""
    counted = int(sum(counts["metrics"].get(semconv.REQUEST_DURATION.name, {}).values()))
    note = (
        f"{estimate_median([part.wakes for part in parts]).value:.1f} wakes/s, {counts['steps']:,} step spans"
    )
    complete = Control(f"{offered - counted} requests missing", offered == counted)
    share = estimate_median([part.share for part in parts])
    claim = f"sidecar, {load.claim}: CPU"
    return [make_line(claim, "% of a core", share, Gate(load.gate), complete, note)]


def _open_request() -> Any:
    request = start.open_request(
        "POST", owner=ENGINE, server=True, operation="chat", provider=ENGINE, model=MODEL
    )
    if request is None:
        raise RuntimeError("nothing is recorded")
    return request
