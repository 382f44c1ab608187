"""How long calls waited in gRPC's core, with a core that is simulated."""

from __future__ import annotations

import json
from collections import deque
from datetime import UTC, datetime
from statistics import median
from types import SimpleNamespace

import pytest

from otel_infer.instrumentation.grpc import accept_wait, channelz
from otel_infer.instrumentation.grpc.accept_wait import AcceptWaits, CoreClock, watch_server

MS = 1_000_000
WALL_AHEAD_NS = 1_700_000_000_000_000_000
CORE_LATE_NS = 1_400 * MS
QUERY_NS = 150_000


class Core:
    """A server of gRPC's core, and the clocks of its process. `now`: monotonic ns. `queue`: arrivals of calls that wait."""

    def __init__(self) -> None:
        self.now = 10_000 * MS
        self.started = self.failed = self.succeeded = self.queries = self.cpu = 0
        self.last_at = 0
        self.queue: deque[tuple[int, bool]] = deque()
        self.answer = None
        self.wall_ahead_ns = WALL_AHEAD_NS

    def arrive(self, at: int, is_reset: bool = False) -> None:
        self.started += 1
        self.last_at = at
        self.queue.append((at, is_reset))

    def accept(self, waits: AcceptWaits) -> tuple[int, int, int]:
        """Returns the number of the call, its wait and the wait that was found, both ns. Calls that were reset are dropped."""
        while self.queue[0][1]:
            self.queue.popleft()
            self.failed += 1
        arrived_at, _ = self.queue.popleft()
        call = waits.note_accepted(self.now)
        return call.number, self.now - arrived_at, self.now - call.waited_since if call.waited_since else 0

    def end(self, waits: AcceptWaits, number: int) -> None:
        self.succeeded += 1
        waits.note_end(number)

    def serve(self, waits: AcceptWaits, ns: int) -> tuple[int, int]:
        """Accepts a call and blocks the loop with it. Returns its wait and the wait that was found, ns."""
        number, true, found = self.accept(waits)
        self.now += ns
        self.end(waits, number)
        return true, found

    # ── as the module `grpc._cython.cygrpc` ──────────────────────────────────────────────────────────────────────

    def channelz_get_servers(self, first: int) -> bytes:
        return json.dumps(
            {"end": True, "server": [{"ref": {"serverId": "7"}}] if first <= 7 else []}
        ).encode()

    def channelz_get_server(self, server: int) -> bytes:
        self.queries += 1
        self.cpu += QUERY_NS
        if self.answer is not None:
            return self.answer
        known_at = (self.last_at + self.wall_ahead_ns - CORE_LATE_NS) // MS * MS
        text = datetime.fromtimestamp(known_at // MS / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        counts = {"callsStarted": self.started, "callsSucceeded": self.succeeded, "callsFailed": self.failed}
        data = {name: str(count) for name, count in counts.items()}
        return json.dumps({"server": {"data": {**data, "lastCallStartedTimestamp": text}}}).encode()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    clock = SimpleNamespace(now=lambda: core.now, wall_now=lambda: core.now + core.wall_ahead_ns)
    monkeypatch.setattr(accept_wait, "_clock", clock)
    monkeypatch.setattr(accept_wait, "time", SimpleNamespace(thread_time_ns=lambda: core.cpu))
    monkeypatch.setitem(channelz.sys.modules, "grpc._cython.cygrpc", core)
    return core


def make_waits() -> AcceptWaits:
    return AcceptWaits(7, CoreClock())


def run_clients(core: Core, waits: AcceptWaits, clients: int, calls: int, ns: int) -> list[tuple[int, int]]:
    """Serves clients that send a call 1 ms after the last one ended; returns true and found waits, ns."""
    for number in range(clients):
        core.arrive(core.now + number * 50_000)
    waited = []
    core.now += MS
    for _ in range(calls):
        waited.append(core.serve(waits, ns))
        core.arrive(core.now + MS)
        core.now += 2 * MS
    return waited


def test_calls_of_an_idle_server_did_not_wait(core: Core) -> None:
    waits = make_waits()
    for _ in range(50):
        core.arrive(core.now)
        core.now += MS // 2
        assert core.serve(waits, 3 * MS)[1] == 0
        core.now += 20 * MS
    assert core.queries == accept_wait.CALIBRATIONS


def test_calls_wait_while_the_loop_is_blocked(core: Core) -> None:
    waited = run_clients(core, make_waits(), 8, 200, 30 * MS)
    assert max(abs(true - found) for true, found in waited[8:]) <= 3 * MS
    assert median(found for _, found in waited) > 200 * MS


def test_a_busy_server_queries_for_two_percent_of_the_time(core: Core) -> None:
    waits, began = make_waits(), core.now
    waited = run_clients(core, waits, 16, 2000, MS // 2)
    assert core.queries * QUERY_NS < 0.021 * (core.now - began)
    assert abs(median(true - found for true, found in waited)) <= 2 * MS


def test_a_client_that_waits_for_each_response_costs_four_queries_per_second(core: Core) -> None:
    waits = make_waits()
    for _ in range(100):
        core.arrive(core.now)
        core.now += MS // 2
        core.serve(waits, MS)
    before, began = core.queries, core.now
    for _ in range(4000):
        core.arrive(core.now)
        core.now += MS // 2
        assert core.serve(waits, MS)[1] == 0
    assert core.queries - before <= (core.now - began) / accept_wait.MAX_INTERVAL_NS + 1


def test_a_threaded_server_that_sees_ends_late_knows_its_waits(core: Core) -> None:
    """Its thread is late by 12 ms at each tenth call, and accepts the calls that came meanwhile then. Four calls are in flight."""
    waits = AcceptWaits(7, CoreClock(), sees_ends=False)
    waited, in_flight = [], deque[int]()
    for number in range(600):
        if number % 10 == 9:
            for late in range(3):
                core.arrive(core.now + late * 4 * MS)
            core.now += 12 * MS
        else:
            core.arrive(core.now)
        while core.queue:
            accepted, true, found = core.accept(waits)
            waited.append((true, found))
            core.now += MS // 2
            in_flight.append(accepted)
            if len(in_flight) > 4:
                waits.note_end(in_flight.popleft())
        core.now += 7 * MS
    assert max(found - true for true, found in waited) <= 4 * MS
    late = [(true, found) for true, found in waited if true > 10 * MS]
    assert sum(found for _, found in late) > 0.3 * sum(true for true, _ in late)


def test_calls_that_were_reset_while_they_waited_are_no_wait_of_others(core: Core) -> None:
    """Three calls arrive at once, every 21 ms. Their arrivals are interpolated between two samples."""
    waits = make_waits()
    for number in range(400):
        core.arrive(core.now, is_reset=number % 3 == 1)
        if number % 3 == 2:
            core.now += MS
            true, found = core.serve(waits, 20 * MS)
            assert abs(found - true) <= 21 * MS


def test_calls_in_flight_are_not_in_the_queue(core: Core) -> None:
    waits = make_waits()
    open_calls = []
    for _ in range(30):  # streams that last
        core.arrive(core.now)
        core.now += MS
        open_calls.append(core.accept(waits)[0])
    waited = run_clients(core, waits, 4, 60, 20 * MS)
    assert max(abs(true - found) for true, found in waited[4:]) <= 3 * MS
    for number in open_calls:
        core.end(waits, number)
        waits.note_end(number)
    assert not waits.in_flight


def test_a_burst_after_a_pause_waited_since_it_came(core: Core) -> None:
    waits = make_waits()
    for _ in range(5):
        for _ in range(6):
            core.arrive(core.now)
        for _ in range(6):
            true, found = core.serve(waits, 25 * MS)
            assert abs(true - found) <= 3 * MS
        core.now += 3_000 * MS


def test_a_clock_that_is_set_makes_no_long_waits(core: Core) -> None:
    waits = make_waits()
    run_clients(core, waits, 1, 20, MS)
    waits.clock.error_ns -= 3_600_000 * MS
    for true, found in run_clients(core, waits, 4, 100, 10 * MS)[12:]:
        assert found <= true + 12 * MS  # until the next query


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'{"server": {"data": {"callsStarted": "x"}}}'])
def test_an_unknown_form_is_queried_once(core: Core, answer: bytes) -> None:
    waits, core.answer = make_waits(), answer
    assert all(found == 0 for _, found in run_clients(core, waits, 8, 100, 30 * MS))
    assert core.queries == 1


def test_a_server_is_the_only_new_one(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = watch_server([3, 5], sees_ends=True)
    assert waits is not None and waits.server_id == 7
    assert watch_server([7], sees_ends=True) is None
    monkeypatch.setitem(channelz.sys.modules, "grpc._cython.cygrpc", None)
    assert channelz.list_servers() == [] and watch_server([], sees_ends=True) is None
