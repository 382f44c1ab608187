"""vLLM's real scheduler with random results in place of a model, and what it did, as the step log should have it."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from otel_infer.instrumentation.vllm import instrumentor
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.step_reader import StepReader

BLOCK_TOKENS = 16


class Scheduled(NamedTuple):
    """A batch: (request, tokens) in order, the load, and each request's results of the step."""

    members: list[tuple[str, int]]
    kv_used: int
    running: int
    waiting: int


class Done(NamedTuple):
    """Tokens delivered to each member, and how many results were discarded because a request left."""

    tokens: list[int]
    discarded: int


class InFlight(NamedTuple):
    """A batch whose results have not come, and the members whose prompt is not complete after it."""

    output: Any
    chunks: set[str]
    left: set[str]


class RandomEngine:
    """Runs random operations on a scheduler. `scheduled` and `done`: by step, of those that a hook saw."""

    def __init__(
        self,
        model: Path,
        seed: int,
        is_async: bool = False,
        caching: bool = True,
        blocks: int = 60,
        **options: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs

        self.random = random.Random(seed)
        self.config = EngineArgs(
            model=str(model), max_model_len=256, enforce_eager=True, enable_prefix_caching=caching, **options
        ).create_engine_config()
        self.scheduler, self._is_async = _make_scheduler(self.config, is_async, blocks), is_async
        self.ids: list[str] = []
        self.in_flight: deque[InFlight] = deque()
        self.scheduled: dict[int, Scheduled] = {}
        self.done: dict[int, Done] = {}
        self._created = 0
        self._watch("_free_request")
        self._watch("_preempt_request")

    def _watch(self, name: str) -> None:
        """Notes requests that leave while they are in flight, as the hook on this function sees them."""

        def note(request: Any, *args: Any, **kwargs: Any) -> Any:
            for flight in self.in_flight if are_hooks_installed() else ():
                if request.request_id in flight.output.num_scheduled_tokens:
                    flight.left.add(request.request_id)
            return getattr(type(self.scheduler), name)(self.scheduler, request, *args, **kwargs)

        setattr(self.scheduler, name, note)

    def add(self) -> None:
        """Adds a request; some are sessions, to which another piece of input comes later."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._created += 1
        request_id = f"chatcmpl-{self._created}"
        tokens = [self.random.randrange(50) for _ in range(self.random.choice((1, 2, 9, 30, 70)))]
        sampling = SamplingParams(max_tokens=self.random.choice((1, 2, 5, 20, 60)), ignore_eos=True)
        priority = self.random.randrange(3) if self.config.scheduler_config.policy == "priority" else 0
        request = Request(
            request_id, tokens, sampling, None, priority=priority, block_hasher=_hasher(),
            resumable=self.random.random() < 0.1,
        )  # fmt: skip
        self.scheduler.add_request(request)
        self.ids.append(request_id)

    def extend(self) -> None:
        """Adds a piece of input to a session, or ends it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sessions = [key for key, request in self.scheduler.requests.items() if request.resumable]
        if sessions:
            more = self.random.random() < 0.6
            sampling = SamplingParams(max_tokens=self.random.choice((1, 5)), ignore_eos=True)
            self.scheduler.add_request(
                Request(self.random.choice(sessions), [1, 2, 3], sampling, None, resumable=more)
            )

    def abort(self) -> None:
        """Aborts a request, as a client that disconnects."""
        from vllm.v1.request import RequestStatus

        if self.scheduler.requests:
            victim = self.random.choice(list(self.scheduler.requests))
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def reset_cache(self) -> None:
        """Preempts all running requests; vLLM then raises if a session waits for input, because it keeps blocks."""
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def reinstall_hooks(self) -> None:
        """Removes the hooks for a few operations."""
        instrumentor.remove()
        for _ in range(self.random.randrange(1, 4)):
            self.random.choice((self.step, self.step, self.add, self.abort))()
        instrumentor.install()

    def step(self) -> None:
        """Schedules a batch, and delivers the results of the oldest one in flight."""
        output = self.scheduler.schedule()
        tokens = output.num_scheduled_tokens
        if tokens:
            requests = self.scheduler.requests
            chunks = {request_id for request_id in tokens if requests[request_id].is_prefill_chunk}
            self.in_flight.append(InFlight(output, chunks, set()))
            self._note_scheduled(output)
        if self.in_flight and (len(self.in_flight) > self._is_async or not tokens):
            self._deliver(self.in_flight.popleft())

    def _note_scheduled(self, output: Any) -> None:
        step = getattr(output, "otel_infer_step", None)
        if step is None:
            return
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        waiting = len(scheduler.waiting) + len(getattr(scheduler, "kv_holding_waiting", ()))
        self.scheduled[step[1]] = Scheduled(
            list(output.num_scheduled_tokens.items()),
            pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            len(scheduler.running),
            waiting,
        )

    def _deliver(self, flight: InFlight) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, members = flight.output, list(flight.output.num_scheduled_tokens)
        sampled: list[list[int]] = [[] if member in flight.chunks else [7] for member in members]
        indexes = {member: index for index, member in enumerate(members)}
        left = len(flight.left)
        result = self.scheduler.update_from_output(
            output, ModelRunnerOutput(req_ids=members, req_id_to_index=indexes, sampled_token_ids=sampled)
        )
        tokens = {one.request_id: len(one.new_token_ids) for of in result.values() for one in of.outputs}
        delivered = [tokens.get(member, 0) for member in members]
        step = getattr(output, "otel_infer_step", None)
        if step is not None and are_hooks_installed():
            self.done[step[1]] = Done(delivered, 0 if set(delivered) == {1} else left)


def are_hooks_installed() -> bool:
    """Returns whether the hooks are installed."""
    return all(
        hook.installed
        for part in instrumentor._parts.values()
        for hook in part.hooks
        if "update_from" in hook.target
    )


def _hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


def _make_scheduler(config: Any, is_async: bool, blocks: int) -> Any:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    kind = AsyncScheduler if is_async else Scheduler
    return kind(config, kv_cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS, log_stats=False)


class ReadSteps:
    """The steps of a ring as a reader reconstructs them: names of the members, by `names` of the handles."""

    def __init__(self, memory: Any) -> None:
        self._reader = StepReader(memory, 1)
        self._members: list[int] = []
        self.scheduled: dict[int, tuple[list[tuple[int, int]], int, int, int]] = {}
        self.done: dict[int, Done] = {}

    def poll(self) -> None:
        """Reads what was written since the last call."""
        for recorded in self._reader.poll(0, final=True):
            event = recorded.event
            assert not isinstance(event, events.StepsLost)
            if isinstance(event, events.StepScheduled):
                self._read_scheduled(event)
            elif isinstance(event, events.StepDone):
                tokens = [1] * len(self.scheduled[event.step][0])
                for position, count in event.delivered:
                    tokens[position] = count
                self.done[event.step] = Done(tokens, event.discarded)

    def _read_scheduled(self, event: events.StepScheduled) -> None:
        if event.keyframe:
            self._members = []
        for position in event.left:
            del self._members[position]
        self._members = [*self._members, *event.joined]
        tokens = [1] * event.size
        for position, count in event.tokens:
            tokens[position] = count
        assert len(self._members) == event.size
        self.scheduled[event.step] = (
            list(zip(self._members, tokens)), event.kv_used, event.running, event.waiting,
        )  # fmt: skip
