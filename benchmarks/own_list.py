"""Step hooks where the engine hands over its own ordered list, and what is stated beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import otel_infer
from benchmarks.engine import PROMPT, Sequence
from benchmarks.hook_cases import CHANGED_NS, DERIVED_NS, KEYFRAME_NS, SEQUENCES, UNCHANGED_NS, Case, repeated
from otel_infer import _clock
from otel_infer._bootstrap import install
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.ringbuffer.writer import MemoryArena
from otel_infer.tracing import request_span, start


def record_in_memory() -> None:
    """Facts go to rings that nobody reads: the writer does the same work, whoever reads."""
    recorder.start(MemoryArena, lambda: None, lambda reason: None)
    request_span.span_factory = install._create_span_factory(None)


class OwnList:
    """An engine that hands over its own ordered list of `members`, and the hooks that an integration puts on it.

    `make` makes a newcomer. Two ring facts a step, in closures that hold the engine's functions.
    """

    def __init__(self, members: list[Any], make: Callable[[], Any], pack: Callable[[Any], bytes]) -> None:
        log = recorder.acquire_batch_writer("benchmark")
        assert log is not None
        self.log: BatchWriter = log
        self.log.pack_handles = pack
        self.members, self.make = members, make
        self.newcomers: list[Any] = []
        self.left: list[Any] = []
        self.several: Any = ()
        self.step = 0
        self.schedule = self._scheduling(self.engine_schedule)
        self.update = self._updating(self.engine_update)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def engine_schedule(self) -> list[Any]:
        """Nothing changes."""
        return self.members

    def engine_update(self) -> None:
        """The forward is over."""

    def change(self) -> None:
        """The engine's own work where one finishes and one is admitted: a new list."""
        members = self.members.copy()
        self.left = [members.pop(SEQUENCES // 2)]
        members.append(self.newcomers.pop())
        self.members = members

    def prompt(self) -> None:
        """The newcomer's prompt is in the step."""
        self.several = ((self.members[-1], PROMPT),)

    # ── our hooks ────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduling(self, original: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        log, hook = self.log, Hook("benchmarks")

        def schedule() -> list[Any]:
            members = original()
            if hook.alive and recorder.active:
                try:
                    self.step = log.write_scheduled(members, self.left, b"", 0, 0, SEQUENCES, 0, self.several)
                except Exception as reason:
                    hook.mark_failed(reason)
            return members

        return schedule

    def _updating(self, original: Callable[[], None]) -> Callable[[], None]:
        log, hook = self.log, Hook("benchmarks")

        def update() -> None:
            original()
            if hook.alive and recorder.active:
                try:
                    log.write_done(self.step, b"", SEQUENCES)
                except Exception as reason:
                    hook.mark_failed(reason)

        return update

    # ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────

    def steady(self, steps: int) -> None:
        """Nobody came or left since the last step."""
        self.left, self.several = [], ()
        self.schedule()

    def renew(self, steps: int) -> None:
        """Gets newcomers ready; the log knows the batch."""
        self.steady(steps)
        self.newcomers = [self.make() for _ in range(steps)]

    def cases(self, objects: str) -> Iterator[Case]:
        """Unchanged, changed, changed with a prompt, keyframe."""
        bare, hooked = (self.engine_schedule, self.engine_update), (self.schedule, self.update)

        def case(
            claim: str, gate_ns: float, before: Callable[[int], None], *engine: Callable[[], Any]
        ) -> Case:
            both = repeated(*engine, *bare), repeated(*engine, *hooked)
            return Case(f"step, {claim}, {objects}", gate_ns, *both, before)

        yield case("own list unchanged", UNCHANGED_NS, self.steady)
        yield case("own list, one joins and one leaves", CHANGED_NS, self.renew, self.change)
        yield case("the same with the newcomer's prompt", CHANGED_NS, self.renew, self.change, self.prompt)
        yield case("keyframe", KEYFRAME_NS, self.steady, self.log.force_keyframe)


def cases() -> Iterator[Case]:
    """On the simulator's objects; a loop of one's own; and what a request says of itself besides."""
    packed_of = attrgetter("packed")
    members = [_sequence() for _ in range(SEQUENCES)]
    yield from OwnList(members, _sequence, lambda some: b"".join(map(packed_of, some))).cases(
        "simulator's objects"
    )
    batch = [otel_infer.request("chat").__enter__() for _ in range(SEQUENCES)]
    yield Case(
        "otel_infer.step(batch), unchanged",
        DERIVED_NS,
        repeated(lambda: batch),
        repeated(lambda: _step(batch)),
    )
    yield Case(
        "request, arrival to end, all facts (any thread)", None, repeated(lambda: None), repeated(_request)
    )


def _sequence() -> Sequence:
    made = Sequence()
    made.packed = b"\x01\x00\x00\x00"
    return made


def _step(batch: list[Any]) -> None:
    with otel_infer.step(batch):
        pass


def _request() -> None:
    request: Any = start.open_request(
        "chat", owner="benchmark", operation="chat", provider="benchmark", model="tiny"
    )
    request.record_submitted("benchmark", 1, 100, 100)
    request.record_event(events.RequestReceived(_clock.now()))
    request.record_event(events.EngineFinished(_clock.now(), "length", 100))
    request.close()
