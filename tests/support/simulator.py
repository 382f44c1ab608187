"""A simulated engine with continuous batching and a ledger of its own, on the real rings and readers.

A program of small numbers (`ticks`) makes it admit, chunk prompts, swap, preempt, speculate and discard results. Members
may sit out steps, and up to two steps are in flight. Tests compare the readers' results with the ledger.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import strategies as st

from otel_infer import _clock
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.ringbuffer import batch_writer, events, layout, merged_reader
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.step_reader import StepReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter

CHUNK = 16
MAX_BATCH_SIZE = 8
"""Maximum members of a batch."""


class Tick(NamedTuple):
    """What happens before and in one step. Indices wrap around."""

    arrivals: list[tuple[int, int, int]]  # (sequences, prompt tokens, output tokens)
    preempt: int
    recompute: bool
    abort: int
    sit_out: int
    swap: bool
    speculate: bool
    reports_leaver: bool
    poll: bool
    nanoseconds: int


def ticks(sequences: int = 3, max_ticks: int = 60) -> st.SearchStrategy[list[Tick]]:
    """Generates programs; most of their steps only decode, as in production."""
    rarely = st.one_of(st.just(-1), st.just(-1), st.just(-1), st.integers(-1, 9))
    arrival = st.tuples(st.integers(1, sequences), st.integers(2, 40), st.integers(1, 8))
    tick = st.builds(
        Tick,
        arrivals=st.one_of(st.just([]), st.lists(arrival, max_size=2)),
        preempt=rarely,
        recompute=st.booleans(),
        abort=rarely,
        sit_out=rarely,
        swap=st.integers(0, 9).map(lambda n: n == 9),
        speculate=st.integers(0, 4).map(lambda n: n == 4),
        reports_leaver=st.booleans(),
        poll=st.booleans(),
        nanoseconds=st.integers(1, 200_000_000),
    )
    return st.lists(tick, max_size=max_ticks)


class Request:
    """The true state of a request."""

    def __init__(self, number: int, handle: int) -> None:
        self.number, self.handle = number, handle
        self.sequences: list[Stream] = []
        self.ended_at = 0
        self.scheduled_at = 0
        self.preemptions = 0
        self.discarded = 0
        self.ledger: dict[int, int] = {}  # step → tokens
        self.others: dict[int, int] = {}  # step → prompt tokens of other requests
        self.chunks: list[tuple[int, int]] = []  # (step, tokens) up to the first token
        self.done_at: dict[int, int] = {}


class Stream:
    """One token stream."""

    def __init__(self, request: Request, prompt: int, output: int) -> None:
        self.request, self.output = request, output
        self.prompt_left = self.prompt = prompt
        self.generated = 0
        self.epoch = 0  # counts preemptions: a preemption discards what is in flight
        self.gone = False


class StepInFlight(NamedTuple):
    """A step between scheduled and done; per member: its epoch, whether it delivers, whether it is a prompt."""

    step: int
    members: list[tuple[Stream, int, bool, bool]]
    prompts: dict[Request, int]
    speculates: bool


class DatedReader(StepReader):
    """Dates lost steps to the last step before them, not to when the loss was noticed."""

    _last_at = 0

    def poll(self, now: int, final: bool = False) -> Iterator[events.RecordedEvent]:
        for recorded in super().poll(now, final):
            if isinstance(recorded.event, events.StepsLost):
                recorded = recorded._replace(event=recorded.event._replace(at=self._last_at))
            self._last_at = recorded.event.at
            yield recorded


class Simulator:
    """`depth`: steps in flight. `sizes`: of the rings."""

    def __init__(self, depth: int, sizes: layout.RingSizes | None = None) -> None:
        sizes = sizes or layout.RingSizes(cells=8192, live_slots=256, strings=64, step_cells=1024)
        self.now, self.depth = 1_000_000_000_000, depth
        self._clocks = [
            mock.patch.object(_clock, "now", new=self._read_clock),
            mock.patch.object(batch_writer, "_now", new=self._read_clock),
        ]
        for patch in self._clocks:
            patch.start()
        self.arena = MemoryArena()
        self.writer = RequestWriter(self.arena, "sim", "server", sizes)
        self.log = BatchWriter(StepWriter(self.arena, "sim-1", "toy", sizes), HandleTable())
        self.log.pack_handles = lambda members: b"".join(
            m.request.handle.to_bytes(4, "little") for m in members
        )
        self.requests: list[Request] = []
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []
        self.left: list[Stream] = []
        self.flights: deque[StepInFlight] = deque()
        self.rings, self.assembler = merged_reader.MergedReader(), Assembler()
        with mock.patch.object(merged_reader, "StepReader", DatedReader):
            for name, memory in self.arena.buffers:
                self.rings.add_ring(name, memory, self.now)
        self.records: list[RequestRecord] = []
        self.recorded_events: list[events.RecordedEvent] = []

    def _read_clock(self) -> int:
        return self.now

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._clocks:
            patch.stop()

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, program: Sequence[Tick]) -> None:
        """Runs the whole program, then until no work is left."""
        for tick in program:
            self.now += tick.nanoseconds
            self._happen(tick)
            self._schedule(tick)
            while len(self.flights) >= self.depth:
                self._done()
            if tick.poll:
                self.poll()
        plain = Tick([], -1, False, -1, -1, False, False, True, True, 1000)
        while self.waiting or self.running or self.flights:
            self.now += 1_000_000
            self._schedule(plain)
            while self.flights and (len(self.flights) >= self.depth or not (self.running or self.waiting)):
                self._done()
            self.poll()
        self.poll(final=True)

    def poll(self, final: bool = False) -> None:
        """Polls the rings once, as a reader does."""
        self.now += 1000
        polled = self.rings.poll(self.now, final)
        self.recorded_events += polled
        self.assembler.feed_events(polled)
        self.records += self.assembler.drain_records(self.rings.horizon + (GRACE_NS if final else 0))

    def _happen(self, tick: Tick) -> None:
        for sequences, prompt, output in tick.arrivals:
            self._arrive(sequences, prompt, output)
        if self.running and tick.preempt >= 0:
            self._preempt(self.running[tick.preempt % len(self.running)], tick.recompute, tick.reports_leaver)
        live = [request for request in self.requests if not request.ended_at]
        if live and tick.abort >= 0:
            self._abort(live[tick.abort % len(live)], tick.reports_leaver)

    def _arrive(self, sequences: int, prompt: int, output: int) -> None:
        number = len(self.requests) + 1
        ids = number.to_bytes(16, "big")
        arrived = events.RequestArrived(
            self.now, self.now, ids, ids[8:], bytes(8), bytes(8), events.SAMPLED, "chat", "toy", "m", "chat m"
        )
        request = Request(number, self.writer.open_request(arrived))
        submitted = events.RequestSubmitted(self.now + 1, sequences, prompt, output, "toy")
        self.writer.write_event(request.handle, submitted)
        request.sequences = [Stream(request, prompt, output) for _ in range(sequences)]
        self.requests.append(request)
        self.waiting += request.sequences
        self.now += 2

    def _preempt(self, sequence: Stream, recompute: bool, reports_leaver: bool) -> None:
        # Work that is still being computed cannot be swapped out.
        flying = [member for flight in self.flights for member in flight.members]
        computing = any(member is sequence and is_prompt for member, _, _, is_prompt in flying)
        recompute = recompute or computing or sequence.generated == 0
        kind = "recompute" if recompute else "offload"
        sequence.request.preemptions += 1
        self.writer.write_event(sequence.request.handle, events.RequestPreempted(self.now, kind))
        self._leave(sequence, reports_leaver)
        sequence.epoch += 1
        if recompute:
            sequence.prompt_left = sequence.prompt + sequence.generated
        self.waiting.appendleft(sequence)
        self.now += 1

    def _abort(self, request: Request, reports_leaver: bool) -> None:
        self._end(request, events.ABORTED, "client_disconnect")
        for sequence in request.sequences:
            if sequence in self.running:
                self._leave(sequence, reports_leaver)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
            sequence.epoch += 1
            sequence.gone = True

    def _leave(self, sequence: Stream, reports_leaver: bool) -> None:
        self.running.remove(sequence)
        if reports_leaver:
            self.left.append(sequence)

    def _end(self, request: Request, outcome: int, error: str) -> None:
        request.ended_at = self.now
        self.writer.close_request(request.handle, events.RequestEnded(self.now, outcome, error, 0, 0, 0, 0))
        self.now += 1

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def _schedule(self, tick: Tick) -> None:
        while self.waiting and len(self.running) < MAX_BATCH_SIZE:
            self.running.append(self.waiting.popleft())
        members = list(self.running)
        if members and tick.sit_out >= 0:
            del members[tick.sit_out % len(members)]
        if tick.swap and len(members) > 1:
            members[0], members[-1] = members[-1], members[0]
        if not members:
            return
        numbers, prompts, flying = [], dict[Request, int](), []
        for sequence in members:
            is_prompt = sequence.prompt_left > 0
            tokens = min(sequence.prompt_left, CHUNK) if is_prompt else 3 if tick.speculate else 1
            sequence.prompt_left -= tokens if is_prompt else 0
            numbers.append(tokens)
            if is_prompt:
                prompts[sequence.request] = prompts.get(sequence.request, 0) + tokens
            flying.append((sequence, sequence.epoch, sequence.prompt_left == 0, is_prompt))
            sequence.request.scheduled_at = sequence.request.scheduled_at or self.now
        column = array("I", numbers).tobytes() if set(numbers) != {1} else b""
        step = self.log.write_scheduled(members, self.left, column)
        self.left = []
        self.flights.append(StepInFlight(step, flying, prompts, tick.speculate))
        self.now += 1

    def _done(self) -> None:
        self.now += 500_000
        flight = self.flights.popleft()
        tokens = [self._delivered(flight, *member[:3]) for member in flight.members]
        discarded = 0
        got: dict[Request, int] = {}
        for (sequence, _, delivers, is_prompt), number in zip(flight.members, tokens):
            request = sequence.request
            if not request.ended_at:
                got[request] = got.get(request, 0) + number
            if delivers and number == 0:
                discarded += 1
                # Only a delivery shows that a chunk was the last one.
                request.discarded += not is_prompt and self.now <= (request.ended_at or self.now) + GRACE_NS
        for request, prompt in flight.prompts.items():
            if not request.ledger and not request.ended_at:
                request.chunks.append((flight.step, prompt))
        for request, number in got.items():
            if number:
                request.ledger[flight.step] = number
                request.others[flight.step] = sum(
                    n for other, n in flight.prompts.items() if other is not request
                )
                request.done_at[flight.step] = self.now
        column = array("I", tokens).tobytes() if set(tokens) != {1} else b""
        self.log.write_done(flight.step, column, len(tokens), discarded)
        self.now += 1
        self._finish(flight)

    def _delivered(self, flight: StepInFlight, sequence: Stream, epoch: int, delivers: bool) -> int:
        if not delivers or epoch != sequence.epoch or sequence.gone:
            return 0
        most = sequence.output - sequence.generated
        number = min(1 + (flight.step % 3 if flight.speculates else 0), most)
        sequence.generated += number
        sequence.gone = sequence.generated >= sequence.output
        return number

    def _finish(self, flight: StepInFlight) -> None:
        for sequence, *_ in flight.members:
            if sequence.gone and sequence in self.running:
                self._leave(sequence, reports_leaver=True)
                finished = events.EngineFinished(self.now, "length", sequence.generated)
                self.writer.write_event(sequence.request.handle, finished)
        for request in {sequence.request: None for sequence, *_ in flight.members}:
            if not request.ended_at and all(s.gone for s in request.sequences):
                self._end(request, events.OK, "")


def tokens_by_step(record: RequestRecord) -> dict[int, int]:
    """Returns step → tokens, as read from the record."""
    rows = record.steps
    return dict(zip(rows.step.tolist(), rows.tokens.tolist())) if rows is not None else {}


def records_by_number(records: Sequence[RequestRecord]) -> dict[int, Any]:
    """Returns the records by the simulator's request number."""
    return {int.from_bytes(record.trace_id, "big"): record for record in records}
