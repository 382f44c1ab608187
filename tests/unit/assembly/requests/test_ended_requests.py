"""A request that has ended is concluded after a while, and waits longer for a sample of its engine's thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer.assembly.engine.thread_delays import ThreadDelays
from otel_infer.assembly.requests.ended_requests import GRACE_NS, MAX_WAIT_NS, SETTLED_NS, EndedRequests
from otel_infer.ringbuffer.events import ThreadRan, ThreadSeen

MS = 1_000_000
END = 1000 * MS
DUE = END + GRACE_NS


class Log:
    """The step log of an engine, with the samples of its thread and the end of its last step."""

    def __init__(self, delays: ThreadDelays, last_step_at: int) -> None:
        self.table = SimpleNamespace(last=9, ended_at=lambda step: last_step_at)
        self.baseline = SimpleNamespace(thread_delays=delays)


def queue_request(delays: ThreadDelays, last_step_at: int = END) -> EndedRequests:
    """Returns the queue with a request that ended at `END`."""
    requests = EndedRequests()
    request: Any = SimpleNamespace(ended_at=END, runs=[], current_runs={Log(delays, last_step_at): (1, 1)})
    requests.add(request)
    return requests


def take(requests: EndedRequests, horizon: int) -> list[int]:
    return [due for _, due in requests.take_due(horizon)]


@pytest.fixture
def delays() -> ThreadDelays:
    return ThreadDelays()


def add(delays: ThreadDelays, until: int) -> EndedRequests:
    """Returns the queue with a request whose engine's last sample ends then; 0 = there is none."""
    if until:
        delays.add_sample(ThreadSeen(until, until - 200 * MS, 100 * MS, 0, 0, 0))
    return queue_request(delays)


@pytest.mark.parametrize("until", [0, END, END + 100 * MS], ids=["no samples", "at its end", "later"])
def test_a_request_is_concluded_after_a_while(delays: ThreadDelays, until: int) -> None:
    requests = add(delays, until)
    assert take(requests, DUE - 1) == []
    assert take(requests, DUE) == [DUE] and take(requests, 1 << 62) == []


def test_it_waits_for_the_sample_of_its_last_step(delays: ThreadDelays) -> None:
    requests = add(delays, END - 50 * MS)
    assert take(requests, DUE + 1000 * MS) == []
    delays.add_sample(ThreadSeen(END + 2000 * MS, END - 50 * MS, 100 * MS, 0, 0, 0))
    (due,) = take(requests, DUE + 2000 * MS)
    assert DUE < due <= DUE + 1400 * MS


def test_it_waits_no_longer_than_for_a_while(delays: ThreadDelays) -> None:
    (due,) = take(add(delays, END - 50 * MS), END + SETTLED_NS)
    assert END + MAX_WAIT_NS <= due <= END + SETTLED_NS


def test_a_thread_that_is_over_has_no_more_samples(delays: ThreadDelays) -> None:
    requests = add(delays, END - 50 * MS)
    delays.add_totals(ThreadRan(END - 10 * MS, END - 500 * MS, "toy", 1, 300_000, 0, 0, 0))
    assert take(requests, DUE) == [DUE]


def test_a_thread_that_is_no_longer_sampled_is_not_waited_for(delays: ThreadDelays) -> None:
    delays.add_sample(ThreadSeen(1, 0, 0, 0, 0, 0))
    assert take(queue_request(delays, last_step_at=20_000 * MS), DUE) == [DUE]
