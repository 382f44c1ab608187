"""Runs transformers' own scheduler of continuous batching without a model, with the otel_infer that is imported first.

    python benchmarks/transformers_scheduler_turns.py MODEL

The module imports nothing of the package `benchmarks`, because it runs with older releases of otel_infer too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1")

import torch
from scheduler_turns import HookTimer, take_turns
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, Scheduler
from transformers.utils import logging

MAX_RUNNING, BLOCK_TOKENS, BLOCKS_EACH = 256, 32, 12
HOOKED: dict[type, tuple[str, ...]] = {
    FIFOScheduler: ("schedule_batch",),
    Scheduler: ("add_waiting_request", "clear_cancelled_requests", "finish_request"),
    ContinuousBatchingIOs: ("prepare_batch_update",),
}
CALLED: dict[type, tuple[str, ...]] = {ModelRunner: ("compute_batch",)}


class ModelFreeEngine:
    """A batch processor, its requests, and results of one token each in place of a model."""

    timer: HookTimer

    def __init__(self, model: str) -> None:
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(
            max_requests_per_batch=MAX_RUNNING,
            block_size=BLOCK_TOKENS,
            num_blocks=2 * MAX_RUNNING * BLOCKS_EACH,
            max_batch_tokens=8192,
            use_async_batching=False,
            use_cuda_graph=False,
            allow_block_sharing=False,
        )
        self.manager: Any = AutoModelForCausalLM.from_pretrained(model).init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.processor = self.manager._create_batch_processor()
        self.scheduler = self.processor.scheduler
        self._created = 0

    def add_request(self, max_tokens: int, prompt: int) -> None:
        """Adds a request, which opens a request of otel_infer."""
        self._created += 1
        tokens = [1 + (self._created * 7 + position) % 1000 for position in range(prompt)]
        self.manager.add_request(tokens, max_new_tokens=max_tokens)

    def run_step(self, during: Callable[[], None]) -> int:
        """Runs the loop once: composes a batch, and delivers one token per request."""
        processor, scheduler = self.processor, self.scheduler
        processor._update_tp_group_state()
        scheduler.clear_cancelled_requests()
        futures = scheduler.schedule_batch(processor.max_batch_tokens, processor.cache.max_tokens_read)[0]
        for future in futures:
            future.state.position_offset += len(future.state.tokens_to_process)
        self.timer.add_time(processor.model_runner.compute_batch, 1)(None, {})
        during()
        processor.inputs_and_outputs.requests_in_batch = futures
        processor.update_batch()
        while not self.manager.output_router.output_queue.empty():
            self.manager.output_router.output_queue.get_nowait()
        return len(futures)

    def end_all(self) -> None:
        """Ends all requests."""
        for request_id in list(self.scheduler.active_requests):
            self.scheduler.set_request_cancellation(request_id)
        self.scheduler.clear_cancelled_requests()


def deliver_tokens(outputs: Any) -> tuple[list[Any], list[int], None]:
    """Returns one token per request, in place of a device's results."""
    return outputs.requests_in_batch, [5] * len(outputs.requests_in_batch), None


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    ContinuousBatchingIOs.prepare_batch_update = deliver_tokens
    ModelRunner.compute_batch = lambda runner, model, batch_data: None
    take_turns(lambda: ModelFreeEngine(sys.argv[1]), HOOKED, "transformers", CALLED)
