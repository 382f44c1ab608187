"""Stacks are requested while something is late, again after a while, and within a budget of CPU time."""

from __future__ import annotations

from typing import Any

import pytest

from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.sidecar.probes.stalls import sampler
from otel_infer.sidecar.probes.stalls.conditions import Stall
from otel_infer.sidecar.probes.stalls.sampler import StallSampler
from otel_infer.sidecar.probes.stalls.stack_text import Frame

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is missing")
MS = 1_000_000
SECOND = 1000 * MS
THREAD, OTHER = 101, 102
STACK = (Frame("/srv/app.py", 31, "lookup"),)


class Process:
    """A process with delays (`stalls`), which are reported once, and the number of its signals."""

    ring, path, engines = 1, "x", ()

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self.signals = self.bytes_read = 0
        self.bytes_per_stack = 200
        self.waiting: list[int] = []
        self.last_step_at = self.last_end_at = 0

    # of the conditions
    process = property(lambda self: self)

    def add_engines(self) -> None: ...

    def find_stalls(self, now: int) -> list[Stall]:
        stalls, self.stalls = self.stalls, []
        return stalls

    def list_waiting_since(self) -> list[int]:
        return self.waiting

    # of the dump
    def find_thread(self, own_id: int) -> int:
        return own_id

    def list_threads(self, running_only: bool = False) -> list[int]:
        return [THREAD, OTHER]

    def read_stack(self, thread: int) -> tuple[Frame, ...]:
        self.signals += 1
        self.bytes_read += self.bytes_per_stack
        return STACK if thread == THREAD else ()

    def waits_for_futex(self, thread: int) -> bool:
        return False

    def close(self) -> None: ...


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process, self.found, self.hangs = Process(), list[events.RecordedEvent](), 0
        monkeypatch.setattr(sampler, "ProcessConditions", lambda process: process)
        monkeypatch.setattr(sampler, "StackDump", lambda process: process)
        listed: Any = [self.process]
        self.sampler = StallSampler(lambda: listed, self.found.append, self.count_hang)

    def count_hang(self) -> None:
        self.hangs += 1

    def look(self, *instants: int) -> int:
        """Looks at these instants (ms after 10 s); returns the signals so far."""
        for at in instants:
            self.sampler.look(10 * SECOND + at * MS)
        return self.process.signals


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def late(since: int = 0, thread: int = THREAD, handle: int = 0) -> Stall:
    return Stall(events.STALLED_REQUEST, 10 * SECOND + since * MS, thread, handle)


def test_nothing_is_signalled_while_nothing_is_late(site: Site) -> None:
    assert site.look(*range(0, 60_000, 100)) == 0
    assert site.found == []


def test_the_code_of_a_late_thread_is_recorded(site: Site) -> None:
    site.process.stalls = [late(handle=9)]
    assert site.look(0) == 1
    located = events.CodeLocated(
        10 * SECOND, 10 * SECOND, events.STALLED_REQUEST, "lookup", "/srv/app.py", 31, "", "", ""
    )
    assert site.found == [events.RecordedEvent(1, 9, located)]


def test_a_thread_without_a_stack_has_no_code(site: Site) -> None:
    site.process.stalls = [late(thread=OTHER)]
    assert site.look(0) == 1 and site.found == []


def test_a_stall_of_an_unknown_thread_is_no_hang(site: Site) -> None:
    site.process.stalls = [late(thread=0)]
    site.look(0)
    assert site.found == []


def test_stacks_have_a_budget(site: Site) -> None:
    site.process.bytes_per_stack = 100_000  # 15 ms in the server
    signals = 0
    for at in range(0, 60_000, 200):
        site.process.stalls = [late(at)]
        signals = site.look(at)
    # 60 ms that were saved up, and 0.15 ms a second.
    assert 4 <= signals <= 5


def test_a_server_that_hangs_has_all_stacks(site: Site) -> None:
    site.process.waiting = [10 * SECOND]
    site.process.engines = (1,)  # type: ignore[assignment]
    assert site.look(*range(0, 59_900, 100)) == 0
    site.look(*range(60_000, 70_000, 100))
    hang, located = (recorded.event for recorded in site.found[:2])
    assert isinstance(hang, events.HangSeen) and hang.requests == 1 and site.hangs == 1
    assert [recorded.event.at for recorded in site.found[1:]] == [at * SECOND for at in (70, 71, 73, 77)]
    assert located.stacks == "thread 1\n  lookup /srv/app.py:31"
    site.process.last_step_at = 80 * SECOND
    site.look(*range(70_000, 80_000, 100))
    assert site.found[-1].event.requests == 0 and site.hangs == 1


def test_an_error_ends_the_sampling_and_not_the_sidecar(site: Site) -> None:
    site.process.stalls = [late()]
    site.process.find_thread = lambda own_id: 1 // 0  # type: ignore[method-assign]
    site.look(0)
    site.sampler.sleep(1)
    assert site.process.signals == 0
