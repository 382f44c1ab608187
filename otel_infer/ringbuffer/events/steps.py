"""TODO ringbuffer.events.steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KV_EVICTION, EMPTY_STEP, DUMMY_BATCH = "kv_eviction", "empty_step", "dummy_batch"
"""Marks: a block of the prefix cache was given up, a step had nothing in it, a rank kept step with its peers."""


class StepScheduled(NamedTuple):
    """A batch was composed. `members` is the ordered batch as handles; only its change travels.

    `left` (positions, each in the batch as earlier removals left it) and `joined` (handles, at the end) turn the
    previous batch into this one; `keyframe` says that `joined` is the whole batch. `tokens` holds (position, tokens) of the members whose scheduled tokens are not 1.
    KV numbers are blocks, 0 of 0 = not known; `waiting` counts requests the scheduler knows and has not scheduled.
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
    """The tokens of a step are known to the engine.

    Every member got one token, but for `delivered`: (position, tokens), 0 tokens = a chunk of a prefill or a discard.
    `discarded` counts sequences whose result was thrown away.
    """

    at: int
    step: int
    delivered: Sequence[tuple[int, int]]
    discarded: int


class StepExecuted(NamedTuple):
    """A worker did its part of a step of an engine, whose process it says, by its host's clock.

    `rank`: which of the workers it is. `log`: number of the engine's step ring among those of that process; 0 = the only one.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    log: int = 0


class WaitingSeen(NamedTuple):
    """So many requests wait in this process' scheduler for this reason: `capacity`, or what keeps them from being scheduled at all."""

    at: int
    reason: str
    requests: int


class BlocksSized(NamedTuple):
    """A block of this engine's KV cache holds so many tokens. `log`: as in `StepExecuted`."""

    at: int
    engine: str
    pid: int
    log: int
    tokens: int


class StepsLost(NamedTuple):
    """Said by the reader: facts of this step ring were overwritten or torn before `at`; wait for a keyframe."""

    at: int
    lost: int
