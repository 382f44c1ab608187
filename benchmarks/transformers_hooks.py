"""The step hooks on real objects of transformers: its scheduler with its cache, its request states and futures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import continuous
from benchmarks.hooks import SEQUENCES, Case
from benchmarks.simulated_hooks import Derived, OwnList
from otel_infer.integrations.transformers import batching, integration

OBJECTS = "transformers' objects"


def cases() -> Iterator[Case]:
    """Own list (its request states, as an engine would hand them over) and derived list (as it does)."""
    import transformers.generation.continuous_batching  # noqa: F401 - what the hooks sit on

    integration.install()
    manager = continuous.manager(continuous.tiny_model(), SEQUENCES)
    processor = manager._create_batch_processor()
    futures = _all_decoding(manager, processor)
    # From here on the hooks under test are called by hand.
    integration.remove()
    scheduler = processor.scheduler
    scheduler._otel_infer_batches = None

    def new_state() -> Any:
        return _new_state(futures[0].state)

    def new_future(query_length: int) -> Any:
        return type(futures[0])(new_state(), True, 0, query_length)

    states = [future.state for future in futures]
    yield from OwnList(states, new_state, batching._pack).cases(OBJECTS)
    yield from Derived(scheduler, futures, new_future).cases(OBJECTS)


def _all_decoding(manager: Any, processor: Any) -> list[Any]:
    """Runs real steps until all sequences decode; returns the futures of the next batch."""
    import torch

    for number in range(SEQUENCES):
        manager.add_request(continuous.prompt(number))
    with torch.no_grad():
        for _ in range(1000):
            processor.prepare_next_batch()
            processor._generation_step(manager.model)
            processor.update_batch()
            states = processor.scheduler.active_requests.values()
            if len(states) == SEQUENCES and all(state.generated_tokens for state in states):
                break
    futures: list[Any] = processor.scheduler.schedule_batch(processor.max_batch_tokens, processor.cache.max_tokens_read)[0]
    assert len(futures) == SEQUENCES
    return futures


def _new_state(like: Any) -> Any:
    made = type(like)(request_id="req_new", initial_tokens=continuous.prompt(1))
    made.otel_infer, made.otel_infer_handle = None, like.otel_infer_handle
    return made
