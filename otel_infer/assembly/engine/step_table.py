"""The last 65,536 steps of one engine as columns. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer.ringbuffer import events

CAPACITY = 65536
"""Steps that are remembered; a request's older steps are counted as forgotten."""
_NAN = float("nan")


class StepTable:
    """The steps of one engine, added in order; some may be missing.

    `last`: number of the latest step. `added`: how many steps were added, also those no longer remembered.
    """

    def __init__(self) -> None:
        # The lines of `RequestSteps`, but with the tokens computed for all requests, not delivered to one.
        self._table: Any = np.zeros((6, CAPACITY), np.int64)
        kv: Any = memoryview(np.zeros(CAPACITY))  # type: ignore[arg-type]
        # Single numbers are read and written through memoryviews, at half the cost of numpy's indexing.
        lines = [memoryview(line) for line in self._table]
        self._step, self._started, self._ended, self._computed, self._size, self._prefill = lines
        self._kv: memoryview[float] = kv
        self.last = self.added = 0

    @property
    def oldest(self) -> int:
        """Returns the number of the oldest step that is remembered."""
        return self.last - CAPACITY + 1

    def begin_step(self, event: events.StepScheduled, prompt_tokens: int) -> None:
        """Adds a scheduled step with this many prompt tokens in it."""
        at, step, _, size, _, _, token_counts, kv_used, kv_total, _, _ = event
        i = step % CAPACITY
        self._step[i], self._started[i], self._ended[i] = step, at, 0
        self._size[i], self._prefill[i] = size, prompt_tokens
        self._computed[i] = size + (sum([tokens - 1 for _, tokens in token_counts]) if token_counts else 0)
        self._kv[i] = kv_used / kv_total if kv_total else _NAN
        self.last = step
        self.added += 1

    def end_step(self, step: int, at: int) -> None:
        """Records when a step was done."""
        i = step % CAPACITY
        if self._step[i] == step:
            self._ended[i] = at

    def subtract_prompt_tokens(self, step: int, fewer: int) -> None:
        """Lowers the prompt tokens of a step by `fewer`."""
        self._prefill[step % CAPACITY] -= fewer

    def get_columns(self, first: int, last: int) -> list[Any]:
        """Returns the steps from `first` to `last` as one or two views, with the lines of `RequestSteps`.

        Each of these steps must be remembered or missing.
        """
        begin, end = first % CAPACITY, last % CAPACITY + 1
        if begin < end:
            return [self._table[:, begin:end]]
        return [self._table[:, begin:], self._table[:, :end]]

    def latest_steps(self, count: int) -> Any:
        """Returns the latest `count` steps and the one before them, as one table."""
        return np.concatenate(self.get_columns(max(self.last - count, 1), self.last), axis=1)

    def raise_computed_tokens(self, step: int, tokens: int) -> None:
        """Raises the computed tokens of a step to at least `tokens`, the number that it delivered."""
        i = step % CAPACITY
        if self._step[i] == step:
            self._computed[i] = max(self._computed[i], tokens)

    def computed_tokens(self, steps: Any) -> Any:
        """Returns the tokens computed in each of these steps, for all requests; 0 = no longer remembered."""
        columns = np.asarray(steps) % CAPACITY
        return np.where(self._table[0, columns] == steps, self._table[3, columns], 0)

    def ended_at(self, step: int) -> int:
        """Returns when this step was done; 0 = not yet, or no longer remembered."""
        i = step % CAPACITY
        return self._ended[i] if self._step[i] == step else 0

    def end_times(self, steps: Any) -> Any:
        """Returns when each of these steps was done; 0 = not yet, or no longer remembered."""
        columns = np.asarray(steps) % CAPACITY
        return np.where(self._table[0, columns] == steps, self._table[2, columns], 0)

    def kv_usage_at(self, step: int) -> float:
        """Returns the KV utilisation when this step was scheduled, 0 to 1; NaN where unknown."""
        i = step % CAPACITY
        return self._kv[i] if self._step[i] == step else float("nan")

    def prefill_tokens(self, step: int) -> int:
        """Returns the prompt tokens of all requests in this step; 0 also if it is no longer remembered."""
        i = step % CAPACITY
        return self._prefill[i] if self._step[i] == step else 0
