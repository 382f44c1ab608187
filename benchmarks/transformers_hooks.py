"""The step hooks on transformers' own scheduler, cache, request states and futures.

The functions of the library that a step calls are replaced by stubs that return a batch. Those that the integration
hooks are called for each step, hooked and bare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from benchmarks import continuous
from benchmarks.hook_cases import DERIVED_NS, KEYFRAME_NS, SEQUENCES, Case, repeat_functions
from benchmarks.own_list import OwnList
from otel_infer.instrumentation.transformers import instrumentor

OBJECTS = "transformers' objects"


def prepare_batch() -> tuple[Any, list[Any]]:
    """Returns a processor whose sequences all decode, after real steps that were not recorded, and its next batch."""
    import torch
    import transformers.generation.continuous_batching  # noqa: F401 - loads the hooked modules

    instrumentor.install()  # objects made from here on have the attributes of our hooks
    manager = continuous.make_manager(continuous.make_model(), SEQUENCES)
    processor = manager._create_batch_processor()
    for number in range(SEQUENCES):
        manager.add_request(continuous.make_prompt(number))
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


def make_cases(processor: Any, futures: list[Any]) -> Iterator[Case]:
    """Yields the cases of an own list (of request states), and of the batch as transformers has it."""
    derived = Derived(processor, futures)
    states = [future.state for future in futures]
    get_packed = attrgetter("otel_infer_handle")
    yield from OwnList(states, derived.make_state, lambda batch: b"".join(map(get_packed, batch))).make_cases(
        OBJECTS
    )
    yield from derived.make_cases()


class Derived:
    """An engine whose batch refers to its sequences, hooked by the integration."""

    def __init__(self, processor: Any, futures: list[Any]) -> None:
        self.scheduler = processor.scheduler
        self.outputs = processor.inputs_and_outputs
        self.futures = futures
        self.newcomers: list[Any] = []
        self.finished_id = ""
        self.result: Any = None
        self.fetched: Any = None
        self._numbers = iter(range(1 << 60))
        self._reset_batch()
        owners = (type(self.scheduler), type(self.outputs), type(self.scheduler).__mro__[1])
        schedule, fetch, finish = (
            _stub_method(owner, name, stub)
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

    def make_state(self) -> Any:
        """Returns a request state."""
        name = f"req_new_{next(self._numbers)}"
        return type(self.futures[0].state)(request_id=name, initial_tokens=continuous.make_prompt(1))

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────

    def change_batch(self) -> None:
        """Replaces a finished sequence by a new one, as the engine does."""
        newcomer = self.newcomers.pop()
        futures = self.futures.copy()
        futures[-1].query_length = 1  # the previous newcomer decodes
        finished = futures.pop(SEQUENCES // 2).state
        futures.append(newcomer)
        self.scheduler.active_requests[newcomer.state.request_id] = newcomer.state
        self.futures, self.finished_id = futures, finished.request_id
        self.result = (futures, False, SEQUENCES - 1 + newcomer.query_length, 0)
        self.fetched = (futures, [], None)

    def run_bare(self) -> None:
        """Runs a step without hooks."""
        schedule, fetch = self.bare_calls
        schedule()
        fetch()

    def run_hooked(self) -> None:
        """Runs a step with the hooks of the integration."""
        self.scheduler.schedule_batch()
        self.outputs.prepare_batch_update()

    def finish_bare(self) -> None:
        """Finishes a sequence without hooks."""
        self.bare_finish(self.finished_id)

    def finish_hooked(self) -> None:
        """Finishes a sequence with hooks."""
        self.scheduler.finish_request(self.finished_id)

    def force_keyframe(self) -> None:
        """Makes the next step a keyframe."""
        self.scheduler._otel_infer_batches.writer.force_keyframe()

    # ── the cases ─────────────────────────────────────────────────────────────────────────────────────────

    def _reset_batch(self) -> None:
        for future in self.futures:
            future.query_length = 1
        self.result, self.fetched = (self.futures, False, SEQUENCES, 0), (self.futures, [], None)

    def prepare_unchanged(self, steps: int) -> None:
        """Prepares steps without a change."""
        self._reset_batch()
        self.run_hooked()

    def prepare_changed(self, query_length: int, steps: int) -> None:
        """Prepares newcomers with this many prompt tokens, after the log has recorded the batch."""
        make = type(self.futures[0])
        self.newcomers = [make(self.make_state(), True, 0, query_length) for _ in range(steps)]
        self.prepare_unchanged(steps)

    def make_cases(self) -> Iterator[Case]:
        """Yields the cases: unchanged, changed, changed with a prompt, keyframe."""

        def case(claim: str, gate_ns: float, *more: Any) -> Case:
            return Case(f"step, list derived{claim}, {OBJECTS}", gate_ns, *more)

        yield case(
            "",
            DERIVED_NS,
            repeat_functions(self.run_bare),
            repeat_functions(self.run_hooked),
            self.prepare_unchanged,
        )
        changing = (
            repeat_functions(self.change_batch, self.finish_bare, self.run_bare),
            repeat_functions(self.change_batch, self.finish_hooked, self.run_hooked),
        )
        before = functools.partial(self.prepare_changed, 1)
        yield case(", one joins and one leaves", DERIVED_NS, *changing, before)
        before = functools.partial(self.prepare_changed, continuous.PROMPT)
        yield case(", the same with the newcomer's prompt", DERIVED_NS, *changing, before)
        keyframe = (
            repeat_functions(self.force_keyframe, self.run_bare),
            repeat_functions(self.force_keyframe, self.run_hooked),
        )
        yield case(", keyframe", KEYFRAME_NS, *keyframe, self.prepare_unchanged)


def _stub_method(owner: Any, name: str, stub: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a method of the library by a stub with its signature, and returns the stub."""
    functools.update_wrapper(stub, getattr(owner, name))
    setattr(owner, name, stub)
    return stub
