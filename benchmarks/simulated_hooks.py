"""The step hooks on objects of the simulated engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.engine import PROMPT, Sequence
from benchmarks.hooks import CHANGED_NS, DERIVED_NS, KEYFRAME_NS, SEQUENCES, UNCHANGED_NS, Case, repeated
from otel_infer import _wiring, clock, facts, ingress
from otel_infer.integrations.transformers import batching
from otel_infer.patching import Hook
from otel_infer.ring import layout
from otel_infer.ring.membership import StepLog
from otel_infer.ring.recorder import recorder
from otel_infer.ring.write import MemoryArena

OBJECTS = "simulator's objects"


def record_in_memory() -> None:
    """Facts go to rings that nobody reads: the writer does the same work, whoever reads."""
    recorder.start(MemoryArena, lambda: None, lambda reason: None)
    ingress.opener = _wiring._opener(None)


class OwnList:
    """An engine that hands over its own ordered list of `members`, and the hooks that an integration puts on it.

    `make` makes a newcomer. Two ring facts a step, in the closures that hold somebody else's function.
    """

    def __init__(self, members: list[Any], make: Callable[[], Any], pack: Callable[[Any], bytes]) -> None:
        log = recorder.step_log("benchmark")
        assert log is not None
        self.log: StepLog = log
        self.log.pack = pack
        self.members, self.make = members, make
        self.newcomers: list[Any] = []
        self.left: list[Any] = []
        self.tokens = b""
        self.step = 0
        self.hook = Hook("benchmarks")
        self.schedule = self._scheduling(self.engine_schedule)
        self.update = self._updating(self.engine_update)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def engine_schedule(self) -> list[Any]:
        """Nothing changes."""
        return self.members

    def engine_update(self) -> None:
        """The forward is over."""

    def change(self) -> None:
        """The engine's own work where one finishes and one is admitted: a new list, as vLLM and SGLang make one."""
        members = self.members.copy()
        self.left = [members.pop(SEQUENCES // 2)]
        members.append(self.newcomers.pop())
        self.members = members

    def prompt(self) -> None:
        """The newcomer's prompt is in the step."""
        self.tokens = PROMPT_COLUMN

    # ── our hooks ────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduling(self, original: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        def schedule() -> list[Any]:
            members = original()
            if self.hook.alive and recorder.active:
                try:
                    self.step = self.log.scheduled(members, self.left, self.tokens, 0, 0, SEQUENCES, 0)
                except Exception as reason:
                    self.hook.fail(reason)
            return members

        return schedule

    def _updating(self, original: Callable[[], None]) -> Callable[[], None]:
        def update() -> None:
            original()
            if self.hook.alive and recorder.active:
                try:
                    self.log.done(self.step, b"", SEQUENCES)
                except Exception as reason:
                    self.hook.fail(reason)

        return update

    # ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────

    def steady(self, steps: int) -> None:
        """Nobody came or left since the last step."""
        self.left, self.tokens = [], b""
        self.schedule()

    def renew(self, steps: int) -> None:
        """Gets newcomers ready; the log knows the batch."""
        self.steady(steps)
        self.newcomers = [self.make() for _ in range(steps)]

    def ask_keyframe(self) -> None:
        """As the reader does after a loss."""
        self.log._writer.words[layout.W_KEYFRAME_ASKED] += 1

    def cases(self, objects: str) -> Iterator[Case]:
        """Own ordered list: unchanged, changed, changed with a prompt, keyframe."""
        engine, hooked = (self.engine_schedule, self.engine_update), (self.schedule, self.update)
        yield Case(
            f"step, own list unchanged, {objects}", UNCHANGED_NS, repeated(*engine), repeated(*hooked), self.steady
        )
        yield Case(
            f"step, one joins and one leaves, {objects}",
            CHANGED_NS,
            repeated(self.change, *engine),
            repeated(self.change, *hooked),
            self.renew,
        )
        changed = (self.change, self.prompt)
        yield Case(
            f"step, one joins with its prompt and one leaves, {objects}",
            CHANGED_NS,
            repeated(*changed, *engine),
            repeated(*changed, *hooked),
            self.renew,
        )
        yield Case(
            f"step, keyframe, {objects}",
            KEYFRAME_NS,
            repeated(self.ask_keyframe, *engine),
            repeated(self.ask_keyframe, *hooked),
            self.steady,
        )


PROMPT_COLUMN = array("I", [1] * (SEQUENCES - 1) + [PROMPT]).tobytes()


class Future:
    """A member of a batch that is only a reference to the sequence, as transformers' are."""

    __slots__ = ("has_new_token", "query_length", "state")

    def __init__(self, state: Any, query_length: int = 1) -> None:
        self.state, self.query_length, self.has_new_token = state, query_length, True


class Derived:
    """An engine whose batch holds references, from which the ordered list must be derived: transformers' hooks on it."""

    def __init__(self, scheduler: Any, futures: list[Any], make: Callable[[int], Any]) -> None:
        self.scheduler, self.futures, self.make = scheduler, futures, make
        self.newcomers: list[Any] = []
        self.result: Any = (futures, False, SEQUENCES, 0)
        self.processor = type("Processor", (), {"scheduler": scheduler})()
        hook = Hook("benchmarks")
        self._schedule = batching._scheduling(lambda scheduler: self.result, hook)
        self._update = batching.update_batch(lambda processor: None, hook)
        self._bare_schedule: Callable[[Any], Any] = lambda scheduler: self.result
        self._bare_update: Callable[[Any], None] = lambda processor: None

    def bare(self) -> None:
        """The engine alone."""
        self._bare_schedule(self.scheduler)
        self._bare_update(self.processor)

    def hooked(self) -> None:
        """With our hooks."""
        self._schedule(self.scheduler)
        self._update(self.processor)

    def change(self) -> None:
        """The engine's own work where one finished and one is admitted, its prompt in the step."""
        newcomer = self.newcomers.pop()
        futures = self.futures.copy()
        futures[-1].query_length = 1  # who came in the step before decodes by now
        self.gone = futures.pop(SEQUENCES // 2).state
        futures.append(newcomer)
        self.futures = futures
        self.result = (futures, False, SEQUENCES - 1 + newcomer.query_length, 0)

    def leave(self) -> None:
        """What `finish_request` says about the batch."""
        batching._told(self.scheduler, self.gone)

    def steady(self, steps: int) -> None:
        """Nobody came or left since the last step."""
        for future in self.futures:
            future.query_length = 1
        self.result = (self.futures, False, SEQUENCES, 0)
        self.hooked()

    def renew(self, query_length: int) -> Callable[[int], None]:
        """Gets newcomers with so many tokens ready; the log knows the batch."""

        def before(steps: int) -> None:
            self.steady(steps)
            self.newcomers = [self.make(query_length) for _ in range(steps)]

        return before

    def ask_keyframe(self) -> None:
        """As the reader does after a loss."""
        self.scheduler._otel_infer_batches.log._writer.words[layout.W_KEYFRAME_ASKED] += 1

    def cases(self, objects: str) -> Iterator[Case]:
        """Derived list: unchanged, changed, changed with a prompt, keyframe."""
        bare, hooked, ask = self.bare, self.hooked, self.ask_keyframe
        yield Case(f"step, list derived, {objects}", DERIVED_NS, repeated(bare), repeated(hooked), self.steady)
        both = repeated(self.change, bare), repeated(self.change, self.leave, hooked)
        yield Case(f"step, list derived, one joins and one leaves, {objects}", DERIVED_NS, *both, self.renew(1))
        claim = f"step, list derived, one joins with its prompt and one leaves, {objects}"
        yield Case(claim, DERIVED_NS, *both, self.renew(PROMPT))
        keyframe = repeated(ask, bare), repeated(ask, hooked)
        yield Case(f"step, list derived, keyframe, {objects}", KEYFRAME_NS, *keyframe, self.steady)


class _Scheduler:
    """What our hooks read of a scheduler of transformers."""

    class _Cache:
        num_blocks = 4096

        def compute_free_capacity(self) -> float:
            return 0.5

    def __init__(self) -> None:
        self.cache = self._Cache()
        self._requests_to_fork: list[Any] = []
        self.active_requests: dict[str, Any] = {}
        self.waiting_requests: dict[str, Any] = {}


class _State(Sequence):
    """A sequence that says what our hooks read of a `RequestState`."""

    __slots__ = ("otel_infer", "otel_infer_handle", "request_id")


def _sequence() -> Sequence:
    made = Sequence()
    made.packed = b"\x01\x00\x00\x00"
    return made


def _state() -> _State:
    made = _State()
    made.request_id, made.otel_infer, made.otel_infer_handle = "req_1", None, b"\x01\x00\x00\x00"
    return made


def cases() -> Iterator[Case]:
    """All on the simulator's objects, and what a request says of itself besides."""
    from benchmarks.ours import _packed_of

    members = [_sequence() for _ in range(SEQUENCES)]
    yield from OwnList(members, _sequence, lambda some: b"".join(map(_packed_of, some))).cases(OBJECTS)
    futures = [Future(_state()) for _ in range(SEQUENCES)]
    yield from Derived(_Scheduler(), futures, lambda length: Future(_state(), length)).cases(OBJECTS)
    yield Case("request, arrival to end, all facts (any thread)", None, repeated(lambda: None), repeated(_request))


def _request() -> None:
    request: Any = ingress.open_request("chat", owner="benchmark", operation="chat", provider="benchmark", model="tiny")
    request.submitted("benchmark", 1, 100, 100)
    request.state(facts.RequestReceived(clock.now()))
    request.state(facts.EngineFinished(clock.now(), "length", 100))
    request.close()
