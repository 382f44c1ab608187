"""Every offered request is exported, dismissed, open, or lost by reason; also when a sidecar is killed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import _clock
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.environment import Config
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.ledger import RequestCounts, RequestLedger
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.pipeline import Pipeline

MS, S = 1_000_000, 1_000_000_000


class Destination:
    """An exporter that queues requests, and confirms them when the test says so."""

    exported_only = True

    def __init__(self, ledger: RequestLedger) -> None:
        self.ledger, self.taken, self.queued, self.received = ledger, 0, list[bytes](), set[bytes]()
        self.failing = b""

    def export_request(self, record: RequestRecord, decision: Decision) -> None:
        if record.span_id == self.failing:
            raise ValueError
        self.taken += 1
        self.queued.append(record.span_id)

    def export_start(self, record: StartRecord) -> None:
        """Ignored."""

    def flush(self, now: int) -> None:
        """Nothing waits for a batch."""

    def confirm(self) -> None:
        self.received |= set(self.queued)
        self.ledger.add_result("exported", len(self.queued))
        self.queued.clear()


class Server:
    """A server with one writer, and the sidecars that read it; time passes when the test says so."""

    def __init__(self, sizes: RingSizes | None = None) -> None:
        self.now, self._numbers = _clock.now() + 1000 * S, itertools.count(1)
        self.arena = MemoryArena()
        self.writer = RequestWriter(self.arena, "1-a", "server", sizes or RingSizes(256, 16, 64, 64))
        self.ledger = RequestLedger()
        self.open: list[int] = []
        self.received: set[bytes] = set()
        self.start_sidecar()

    def start_sidecar(self) -> None:
        """Starts a sidecar; one that ran before is gone with all that it held."""
        self.rings = MergedReader(self.ledger)
        self.destination = Destination(self.ledger)
        self.destination.received = self.received
        for name, memory in self.arena.buffers:
            self.rings.add_ring(name, memory, self.now)
        config = Config(gpu_metrics=False)
        self.pipeline = Pipeline(config, self.rings, [self.destination], None, {}, None, 0)

    def offer(self, flags: int = events.SAMPLED) -> int:
        self.now += MS
        span = next(self._numbers).to_bytes(8, "big")
        fields = self.now, self.now, bytes(8) + span, span, bytes(8), bytes(8)
        handle = self.writer.open_request(events.RequestArrived(*fields, flags, "chat", "toy", "m", "n"))
        if handle:
            self.open.append(handle)
        return handle

    def end(self, handle: int) -> None:
        self.now += MS
        self.open.remove(handle)
        self.writer.close_request(handle, events.RequestEnded(self.now, events.OK, "", 200, 0, 0, 0))

    def serve(self, requests: int, flags: int = events.SAMPLED) -> None:
        for _ in range(requests):
            handle = self.offer(flags)
            if handle:
                self.end(handle)

    def poll(self, cycles: int = 1) -> None:
        for _ in range(cycles):
            self.now += 500 * MS
            self.pipeline.run_cycle(self.now)

    def settle(self) -> RequestCounts:
        """Ends all requests, lets the sidecar read everything, and returns the counts."""
        for handle in list(self.open):
            self.end(handle)
        self.poll(12)
        self.destination.confirm()
        return self.pipeline.accounting.read_counts()


def nonzero(counts: RequestCounts) -> dict[str, int]:
    named = {**counts.results, **counts.lost, "open": counts.open}
    return {name: count for name, count in named.items() if count}


@pytest.fixture
def server() -> Server:
    return Server()


def test_requests_are_exported_not_sampled_or_open(server: Server) -> None:
    server.serve(3)
    server.serve(2, flags=0)
    server.offer()
    server.poll(4)
    assert nonzero(server.pipeline.accounting.read_counts()) == {"not_sampled": 2, "open": 4}
    server.destination.confirm()
    assert nonzero(server.pipeline.accounting.read_counts()) == {"exported": 3, "not_sampled": 2, "open": 1}


def test_a_fragment_of_another_process_is_no_request(server: Server) -> None:
    server.serve(2, flags=events.SAMPLED | events.JOINED)
    assert server.settle().offered == 0


def test_requests_without_room_are_not_recorded(server: Server) -> None:
    for _ in range(20):
        server.offer()
    assert nonzero(server.settle()) == {"exported": 16, "not_recorded": 4}


def test_requests_whose_events_were_overwritten_are_counted_one_by_one(server: Server) -> None:
    server.serve(5)
    server.poll(4)
    server.serve(500)
    counts = server.settle()
    assert counts.offered == 505
    assert counts.results["exported"] == len(server.received) < 505
    assert counts.lost["events_overwritten"] == 505 - len(server.received)
    assert counts.open == 0


def test_requests_that_a_killed_sidecar_held_are_counted(server: Server) -> None:
    server.serve(4)
    server.poll(4)
    server.destination.confirm()
    server.serve(3)
    server.poll(4)  # concluded and queued, not sent
    server.start_sidecar()
    server.serve(2)
    assert nonzero(server.settle()) == {"exported": 6, "sidecar_ended": 3}


def test_requests_that_a_killed_sidecar_had_only_read_are_exported_by_the_next(server: Server) -> None:
    server.serve(3)
    server.offer()
    server.now += 100 * MS
    server.pipeline.run_cycle(server.now)
    server.start_sidecar()
    assert nonzero(server.settle()) == {"exported": 4}
    assert len(server.received) == 4


def test_requests_overwritten_while_no_sidecar_ran_are_counted(server: Server) -> None:
    server.serve(4)
    server.poll(4)
    server.destination.confirm()
    server.serve(400)
    server.start_sidecar()
    counts = server.settle()
    assert counts.lost["sidecar_ended"] == 404 - len(server.received)
    assert (counts.offered, counts.open) == (404, 0)


def test_a_request_that_fails_in_the_pipeline_is_counted(server: Server) -> None:
    server.destination.failing = (2).to_bytes(8, "big")
    server.serve(3)
    assert nonzero(server.settle()) == {"exported": 2, "requests_not_converted": 1}


def test_counts_of_a_removed_ring_are_added_once() -> None:
    ledger = RequestLedger()
    ledger.close_ring(7, 10, 3)
    assert (ledger.closed_counts, ledger.is_closed(7), ledger.is_closed(8)) == ((10, 3), True, False)


def test_a_restarted_sidecar_can_leave_out_what_earlier_ones_counted(server: Server) -> None:
    server.serve(4)
    server.poll(4)
    server.destination.confirm()
    server.start_sidecar()
    server.serve(2)
    assert server.settle().offered == 6
    own = server.pipeline.accounting.read_counts(own_only=True)
    assert (own.offered, nonzero(own)) == (2, {"exported": 2})


STEPS = st.lists(
    st.sampled_from(["offer", "end", "serve", "burst", "poll", "poll", "confirm", "kill"]), max_size=40
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_the_equation_holds_after_any_order_of_events(steps: list[str]) -> None:
    server = Server()
    for step in steps:
        match step:
            case "offer":
                server.offer()
            case "end" if server.open:
                server.end(server.open[0])
            case "serve":
                server.serve(3)
            case "burst":
                server.serve(150)
            case "poll":
                server.poll()
            case "confirm":
                server.destination.confirm()
            case "kill":
                server.start_sidecar()
        counts = server.pipeline.accounting.read_counts()
        assert counts.open >= len(server.open), "no request in flight is counted as anything else"
    counts = server.settle()
    assert counts.open == 0
    assert counts.results["exported"] == len(server.received)
