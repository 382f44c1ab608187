"""Events about engine steps: batches, results, the workers' parts, waiting requests, KV block sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KV_EVICTION, EMPTY_STEP, DUMMY_BATCH = "kv_eviction", "empty_step", "dummy_batch"
"""Marks: a block of the prefix cache was evicted, a step was empty, a rank ran a dummy batch to keep pace
with its peers.
"""


class StepScheduled(NamedTuple):
    """Composition of a batch, an ordered list of handles; only its change is recorded.

    `left` (positions, each in the batch as earlier removals left it) and `joined` (handles, at the end) turn
    the previous batch into this one. `keyframe`: `joined` is the whole batch. `tokens`: (position, tokens) of
    the members whose scheduled tokens are not 1. `kv_used` and `kv_total` count KV blocks, 0 of 0 = unknown.
    `waiting` counts the requests that the scheduler holds and has not scheduled.
    """

    at: int
    step: int
    keyframe: bool
    size: int
    left: Sequence[int]
    joined: Sequence[int]
    tokens: Sequence[tuple[int, int]]
    kv_used: int
    kv_total: int
    running: int
    waiting: int


class StepDone(NamedTuple):
    """End of a step: its tokens are known to the engine.

    Every member got one token, except those in `delivered`: (position, tokens), where 0 tokens = a chunk of a
    prefill or a discarded result. `discarded` counts the sequences whose result was discarded.
    """

    at: int
    step: int
    delivered: Sequence[tuple[int, int]]
    discarded: int


class StepExecuted(NamedTuple):
    """Worker's part of an engine step, by the worker's host clock.

    `pid`: the engine's process. `rank`: the worker's. `ring_number`: number of the engine's step ring among
    those of that process; 0 = the only one.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    ring_number: int = 0


class WaitingSeen(NamedTuple):
    """Number of requests that wait in this process's scheduler for one reason.

    `reason`: `capacity`, or a condition that prevents scheduling at all.
    """

    at: int
    reason: str
    requests: int


class BlocksSized(NamedTuple):
    """Tokens per block of this engine's KV cache. `ring_number`: as in `StepExecuted`."""

    at: int
    engine: str
    pid: int
    ring_number: int
    tokens: int


class StepsLost(NamedTuple):
    """Loss, added by the reader: events of this step ring were overwritten or torn before `at`.

    The batch is unknown until the next keyframe.
    """

    at: int
    lost: int


STEP_EVENTS = (
    StepScheduled, StepDone, StepExecuted, WaitingSeen, BlocksSized, StepsLost,
)  # fmt: skip
"""The types that this module defines."""
