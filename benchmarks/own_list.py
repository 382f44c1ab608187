"""Step hooks of an engine that hands over its own ordered list, `otel_infer.step`, and the events of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import otel_infer
from benchmarks.engine import PROMPT, Sequence
from benchmarks.hook_cases import (
    CHANGED_NS,
    DERIVED_NS,
    KEYFRAME_NS,
    SEQUENCES,
    UNCHANGED_NS,
    Case,
    repeat_functions,
)
from otel_infer import _clock
from otel_infer.config import environment
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start
from otel_infer.tracing.sampler import create_span_factory


def record_in_memory() -> None:
    """Records into rings without a reader; the writer's work is the same."""
    recorder.start(MemoryArena, lambda: None, lambda reason: None)
    request_span.span_factory = create_span_factory(None, environment.from_env())


class OwnList:
    """An engine with its own ordered list of `members`, and the hooks of an integration on it.

    `make` makes a new member. The hooks record two events per step.
    """

    def __init__(self, members: list[Any], make: Callable[[], Any], pack: Callable[[Any], bytes]) -> None:
        log = recorder.acquire_batch_writer("benchmark")
        assert log is not None
        self.log: BatchWriter = log
        self.log.pack_handles = pack
        self.members, self.make = members, make
        self.newcomers: list[Any] = []
        self.left: list[Any] = []
        self.prompts: Any = ()
        self.step = 0
        self.schedule = self._hook_schedule(self.engine_schedule)
        self.update = self._hook_update(self.engine_update)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def engine_schedule(self) -> list[Any]:
        """Returns an unchanged batch."""
        return self.members

    def engine_update(self) -> None:
        """Replaces the forward."""

    def change_members(self) -> None:
        """Makes a new list, as an engine does if one sequence finishes and one is admitted."""
        members = self.members.copy()
        self.left = [members.pop(SEQUENCES // 2)]
        members.append(self.newcomers.pop())
        self.members = members

    def add_prompt(self) -> None:
        """Adds the newcomer's prompt to the step."""
        self.prompts = ((self.members[-1], PROMPT),)

    # ── our hooks ────────────────────────────────────────────────────────────────────────────────────────────────

    def _hook_schedule(self, original: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        log, hook = self.log, Hook("benchmarks")

        def schedule() -> list[Any]:
            members = original()
            if hook.alive and recorder.active:
                try:
                    self.step = log.write_scheduled(members, self.left, b"", 0, 0, SEQUENCES, 0, self.prompts)
                except Exception as reason:
                    hook.mark_failed(reason)
            return members

        return schedule

    def _hook_update(self, original: Callable[[], None]) -> Callable[[], None]:
        log, hook = self.log, Hook("benchmarks")

        def update() -> None:
            original()
            if hook.alive and recorder.active:
                try:
                    log.write_done(self.step, b"", SEQUENCES)
                except Exception as reason:
                    hook.mark_failed(reason)

        return update

    # ── the cases ─────────────────────────────────────────────────────────────────────────────────────────

    def prepare_unchanged(self, steps: int) -> None:
        """Prepares steps without a change."""
        self.left, self.prompts = [], ()
        self.schedule()

    def prepare_changed(self, steps: int) -> None:
        """Prepares newcomers, after the log has recorded the batch."""
        self.prepare_unchanged(steps)
        self.newcomers = [self.make() for _ in range(steps)]

    def make_cases(self, objects: str) -> Iterator[Case]:
        """Unchanged, changed, changed with a prompt, keyframe."""
        bare, hooked = (self.engine_schedule, self.engine_update), (self.schedule, self.update)

        def case(
            claim: str, gate_ns: float, before: Callable[[int], None], *engine: Callable[[], Any]
        ) -> Case:
            both = repeat_functions(*engine, *bare), repeat_functions(*engine, *hooked)
            return Case(f"step, {claim}, {objects}", gate_ns, *both, before)

        yield case("own list unchanged", UNCHANGED_NS, self.prepare_unchanged)
        yield case(
            "own list, one joins and one leaves", CHANGED_NS, self.prepare_changed, self.change_members
        )
        yield case(
            "the same with the newcomer's prompt",
            CHANGED_NS,
            self.prepare_changed,
            self.change_members,
            self.add_prompt,
        )
        yield case("keyframe", KEYFRAME_NS, self.prepare_unchanged, self.log.force_keyframe)


def make_cases() -> Iterator[Case]:
    """Yields the cases on the simulator's objects, of a hand-written loop, and of a request."""
    get_packed = attrgetter("packed")
    members = [_make_sequence() for _ in range(SEQUENCES)]
    yield from OwnList(members, _make_sequence, lambda batch: b"".join(map(get_packed, batch))).make_cases(
        "simulator's objects"
    )
    batch = [otel_infer.request("chat").__enter__() for _ in range(SEQUENCES)]
    yield Case(
        "otel_infer.step(batch), unchanged",
        DERIVED_NS,
        repeat_functions(lambda: batch),
        repeat_functions(lambda: _run_step(batch)),
    )
    yield Case(
        "request, arrival to end, all events (any thread)",
        None,
        repeat_functions(lambda: None),
        repeat_functions(_record_request),
    )


def _make_sequence() -> Sequence:
    sequence = Sequence()
    sequence.packed = b"\x01\x00\x00\x00"
    return sequence


def _run_step(batch: list[Any]) -> None:
    with otel_infer.step(batch):
        pass


def _record_request() -> None:
    request: Any = start.open_request(
        "chat", owner="benchmark", operation="chat", provider="benchmark", model="tiny"
    )
    request.record_submitted("benchmark", 1, 100, 100)
    request.record_event(events.RequestReceived(_clock.now()))
    request.record_event(events.EngineFinished(_clock.now(), "length", 100))
    request.close()
