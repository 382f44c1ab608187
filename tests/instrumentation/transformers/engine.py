"""A transformers continuous batching engine for tests, driven by hand or by its own thread, with a log of its batches.

The log is taken where a batch becomes tensors, which no hook of ours touches.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs

SIZES = {"num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 16}
PAGE = 16


def prompt(tokens: int, start: int = 100) -> list[int]:
    """Returns token ids without special tokens."""
    return list(range(start, start + tokens))


def settings(**wanted: Any) -> ContinuousBatchingConfig:
    """Returns a configuration with these settings, less those that this release does not have."""
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = {"page_size" if "page_size" in known else "block_size": PAGE}
    plain = {"use_async_batching": False, "use_cuda_graph": False, "allow_block_sharing": False}
    values = {**SIZES, **page, **plain, **wanted}
    return ContinuousBatchingConfig(**{name: value for name, value in values.items() if name in known})


class Member(NamedTuple):
    """One sequence in one batch."""

    request_id: str
    tokens: int
    delivers: bool


class Batch(NamedTuple):
    """The members of one step, and the cache's own numbers at that time."""

    members: list[Member]
    running: int
    waiting: int
    kv_used: int


class Engine:
    """A manager on `model`. Call `step`, or `start` and `wait`."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch, generation: Any = None, **wanted: Any) -> None:
        base = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0}
        config = GenerationConfig(**{**base, **(generation or {})})
        self.manager = model.init_continuous_batching(
            generation_config=config, continuous_batching_config=settings(**wanted)
        )
        self.batches: list[Batch] = []
        self._processor: Any = None
        self._log_batches(patch)

    # ── driven by hand ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def processor(self) -> Any:
        """Returns the batch processor, which the first step creates."""
        return self._processor or self.manager.batch_processor

    @property
    def scheduler(self) -> Any:
        return self.processor.scheduler

    @property
    def cache(self) -> Any:
        return self.processor.cache

    def add(self, tokens: int | Sequence[int], **more: Any) -> str:
        """Adds one request; a number stands for a prompt of that many tokens."""
        ids = prompt(tokens) if isinstance(tokens, int) else list(tokens)
        request_id = self.manager.add_request(ids, **more)
        assert request_id is not None
        return str(request_id)

    def step(self) -> bool:
        """Runs the loop once; returns False if there was nothing to do."""
        with torch.no_grad():
            if self._processor is None:
                self._processor = self.manager.batch_processor = self.manager._create_batch_processor()
            if not self._processor.prepare_next_batch():
                return False
            self.manager._generation_step()
            self._processor.update_batch()
        return True

    def run(self, steps: int = 500) -> None:
        """Runs steps until nothing is left to do."""
        for _ in range(steps):
            if not self.step() and not (self._processor.has_pending_requests()):
                return
        pytest.fail(f"the engine still has work after {steps} steps")

    def results(self) -> dict[str, Any]:
        """Returns the last output of each request."""
        found = {}
        while not self.manager.output_router.output_queue.empty():
            output = self.manager.output_router.output_queue.get_nowait()
            found[output.request_id] = output
        return found

    # ── driven by its thread ─────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> Engine:
        self.manager.start()
        return self

    def wait(self, count: int, timeout: float = 30.0) -> dict[str, Any]:
        """Waits for `count` ended requests; returns their outputs."""
        found: dict[str, Any] = {}
        deadline = time.monotonic() + timeout
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} requests have ended"
            output = self.manager.get_result(timeout=0.2)
            if output is not None and output.status.name in ("FINISHED", "FAILED"):
                found[output.request_id] = output
        return found

    def wait_for_steps(self, count: int, timeout: float = 30.0) -> None:
        """Waits until `count` steps have begun."""
        deadline = time.monotonic() + timeout
        while len(self.batches) < count:
            assert time.monotonic() < deadline, f"{len(self.batches)} of {count} steps have begun"
            time.sleep(0.001)

    def stop(self, **how: Any) -> None:
        self.manager.stop(block=True, timeout=20, **how)

    # ── the log of batches ───────────────────────────────────────────────────────────────────────────────────────

    def _log_batches(self, patch: pytest.MonkeyPatch) -> None:
        # A manager collects garbage twice when it ends, which is slow in a test session.
        patch.setattr(gc, "collect", lambda *_: 0)
        original = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors

        def prepare(ios: Any, requests_in_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self.processor is not None and ios.cache is self.processor.cache:
                self._log_batch(requests_in_batch)
            return original(ios, requests_in_batch, *args, **kwargs)

        patch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", prepare)

    def _log_batch(self, futures: Any) -> None:
        members = [
            Member(f.state.request_id, len(f.state.tokens_to_process), f.has_new_token) for f in futures
        ]
        running, waiting = len(self.scheduler.active_requests), len(self.scheduler.waiting_requests)
        self.batches.append(Batch(members, running, waiting, kv_used(self.cache)))

    def steps_of(self, request_id: str) -> list[tuple[int, Member]]:
        """Returns the steps (from 1) that contain a request's sequences."""
        return [
            (number, member)
            for number, batch in enumerate(self.batches, 1)
            for member in batch.members
            if member.request_id.partition("__child#")[0] == request_id
        ]


def kv_used(cache: Any) -> int:
    """Blocks in use by the cache's own count."""
    if hasattr(cache, "get_num_free_blocks"):
        return int(cache.num_blocks - cache.get_num_free_blocks())
    block = cache.num_sectors * cache.bytes_per_sector / cache.num_blocks
    return int(cache.num_blocks - round(cache.compute_free_capacity(relative=False) / block))
