"""`explain` lists the threads of a server that hangs, without the idle ones."""

from __future__ import annotations

from otel_infer.assembly.assembler import Assembler
from otel_infer.cli.explain.hang import describe_hang
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent

SECOND = 1_000_000_000
STACKS = """thread 1
  wait /usr/lib/python3.11/threading.py:327
  get /usr/lib/python3.11/queue.py:171
thread 2
  wait_for_quota /srv/app.py:15
  generate /srv/app.py:20"""


def hanging(*more: events.HangSeen) -> Assembler:
    assembler = Assembler()
    stacks = events.CodeLocated(64 * SECOND, SECOND, events.STALLED_PROCESS, "", "", 0, "", "", STACKS)
    seen = (events.HangSeen(63 * SECOND, SECOND, 2), stacks, *more)
    assembler.feed_events(RecordedEvent(1, 0, event) for event in seen)
    return assembler


def test_the_threads_of_a_server_that_hangs_are_listed() -> None:
    assert describe_hang(hanging()) == [
        "the server hangs: 2 requests are in flight, and no step has ended for 62 s",
        "  process 1 of 1, its threads, innermost function first",
        "    · wait_for_quota /srv/app.py:15",
        "      generate /srv/app.py:20",
        "  change first: see which of these functions wait for each other, or for a device",
    ]


def test_a_server_that_went_on_does_not_hang() -> None:
    assert (
        describe_hang(Assembler())
        == describe_hang(hanging(events.HangSeen(80 * SECOND, 80 * SECOND, 0)))
        == []
    )
