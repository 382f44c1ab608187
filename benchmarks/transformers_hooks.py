"""The step hooks on real objects of transformers: its scheduler with its cache, its request states and futures.

The functions of the library that a step goes through are replaced by ones that do nothing but return a batch; whatever
of them the integration hooks is then called for every step, once hooked and once bare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from benchmarks import continuous
from benchmarks.hook_cases import DERIVED_NS, KEYFRAME_NS, SEQUENCES, Case, repeated
from benchmarks.own_list import OwnList
from otel_infer.instrumentation.transformers import instrumentor

OBJECTS = "transformers' objects"


def batch_of_all() -> tuple[Any, list[Any]]:
    """A processor all of whose sequences decode, after real steps that nobody recorded, and its next batch."""
    import torch
    import transformers.generation.continuous_batching  # noqa: F401 - what the hooks sit on

    instrumentor.install()  # what is made now carries what our hooks look for
    manager = continuous.manager(continuous.tiny_model(), SEQUENCES)
    processor = manager._create_batch_processor()
    for number in range(SEQUENCES):
        manager.add_request(continuous.prompt(number))
    active = processor.scheduler.active_requests
    with torch.no_grad():
        while len(active) < SEQUENCES or not all(state.generated_tokens for state in active.values()):
            processor.prepare_next_batch()
            processor._generation_step(manager.model)
            processor.update_batch()
    sizes = processor.max_batch_tokens, processor.cache.max_tokens_read
    futures: list[Any] = processor.scheduler.schedule_batch(*sizes)[0]
    instrumentor.remove()
    assert len(futures) == SEQUENCES
    return processor, futures


def cases(processor: Any, futures: list[Any]) -> Iterator[Case]:
    """Own list (its request states, as an engine would hand them over), and derived as it is in transformers."""
    derived = Derived(processor, futures)
    states = [future.state for future in futures]
    packed_of = attrgetter("otel_infer_handle")
    yield from OwnList(states, derived.new_state, lambda some: b"".join(map(packed_of, some))).cases(OBJECTS)
    yield from derived.cases()


class Derived:
    """An engine whose batch holds references to its sequences, hooked by the integration."""

    def __init__(self, processor: Any, futures: list[Any]) -> None:
        self.scheduler = processor.scheduler
        self.outputs = processor.inputs_and_outputs
        self.futures = futures
        self.newcomers: list[Any] = []
        self.gone = ""
        self.result: Any = None
        self.fetched: Any = None
        self._numbers = iter(range(1 << 60))
        self._steady()
        owners = (type(self.scheduler), type(self.outputs), type(self.scheduler).__mro__[1])
        schedule, fetch, finish = (
            _stubbed(owner, name, stub)
            for owner, (name, stub) in zip(
                owners,
                {
                    "schedule_batch": lambda scheduler, *sizes: self.result,
                    "prepare_batch_update": lambda outputs: self.fetched,
                    "finish_request": lambda scheduler, request_id: scheduler.active_requests.pop(request_id),
                }.items(),
            )
        )
        self.bare_calls = functools.partial(schedule, self.scheduler), functools.partial(fetch, self.outputs)
        self.bare_finish = functools.partial(finish, self.scheduler)
        instrumentor.install()

    def new_state(self) -> Any:
        """A request state like the others."""
        name = f"req_new_{next(self._numbers)}"
        return type(self.futures[0].state)(request_id=name, initial_tokens=continuous.prompt(1))

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def change(self) -> None:
        """The engine's own work where one is admitted in the place of one that finished."""
        newcomer = self.newcomers.pop()
        futures = self.futures.copy()
        futures[-1].query_length = 1  # who came in the step before decodes by now
        leaver = futures.pop(SEQUENCES // 2).state
        futures.append(newcomer)
        self.scheduler.active_requests[newcomer.state.request_id] = newcomer.state
        self.futures, self.gone = futures, leaver.request_id
        self.result = (futures, False, SEQUENCES - 1 + newcomer.query_length, 0)
        self.fetched = (futures, [], None)

    def bare(self) -> None:
        """A step without hooks."""
        schedule, fetch = self.bare_calls
        schedule()
        fetch()

    def hooked(self) -> None:
        """A step with whatever hooks the integration has put there."""
        self.scheduler.schedule_batch()
        self.outputs.prepare_batch_update()

    def bare_leave(self) -> None:
        """One finishes, without hooks."""
        self.bare_finish(self.gone)

    def hooked_leave(self) -> None:
        """One finishes."""
        self.scheduler.finish_request(self.gone)

    def state_whole(self) -> None:
        """The next step is a keyframe."""
        self.scheduler._otel_infer_batches.writer.force_keyframe()

    # ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────

    def _steady(self) -> None:
        for future in self.futures:
            future.query_length = 1
        self.result, self.fetched = (self.futures, False, SEQUENCES, 0), (self.futures, [], None)

    def steady(self, steps: int) -> None:
        """Nobody came or left since the last step."""
        self._steady()
        self.hooked()

    def renew(self, query_length: int, steps: int) -> None:
        """Gets newcomers ready whose prompts have so many tokens; the log knows the batch."""
        make = type(self.futures[0])
        self.newcomers = [make(self.new_state(), True, 0, query_length) for _ in range(steps)]
        self.steady(steps)

    def cases(self) -> Iterator[Case]:
        """Unchanged, changed, changed with a prompt, keyframe."""

        def case(claim: str, gate_ns: float, *more: Any) -> Case:
            return Case(f"step, list derived{claim}, {OBJECTS}", gate_ns, *more)

        yield case("", DERIVED_NS, repeated(self.bare), repeated(self.hooked), self.steady)
        changing = (
            repeated(self.change, self.bare_leave, self.bare),
            repeated(self.change, self.hooked_leave, self.hooked),
        )
        before = functools.partial(self.renew, 1)
        yield case(", one joins and one leaves", DERIVED_NS, *changing, before)
        before = functools.partial(self.renew, continuous.PROMPT)
        yield case(", the same with the newcomer's prompt", DERIVED_NS, *changing, before)
        keyframe = repeated(self.state_whole, self.bare), repeated(self.state_whole, self.hooked)
        yield case(", keyframe", KEYFRAME_NS, *keyframe, self.steady)


def _stubbed(owner: Any, name: str, stub: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function that does next to nothing in the place of the library's, with its signature."""
    functools.update_wrapper(stub, getattr(owner, name))
    setattr(owner, name, stub)
    return stub
