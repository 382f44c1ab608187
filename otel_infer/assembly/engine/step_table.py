"""The last 65,536 steps of one engine as columns. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer.ringbuffer import events

CAPACITY = 65536
"""Steps that are remembered; a request's older steps are counted as forgotten."""
_NAN = float("nan")


class StepTable:
    """Steps come in order; some may be missing. `last`: the latest."""

    def __init__(self) -> None:
        # As rows of a request, but for the tokens: those that were computed for all, and not each request's own.
        self._table: Any = np.zeros((6, CAPACITY), np.int64)
        kv: Any = memoryview(np.zeros(CAPACITY))  # type: ignore[arg-type]
        # Single numbers are read and written through memoryviews, at half the price of numpy's.
        lines = [memoryview(line) for line in self._table]
        self._step, self._started, self._ended, self._computed, self._size, self._prefill = lines
        self._kv: memoryview[float] = kv
        self.last = 0

    @property
    def oldest(self) -> int:
        """The oldest step that is remembered."""
        return self.last - CAPACITY + 1

    def begin_step(self, fact: events.StepScheduled, prompt_tokens: int) -> None:
        """A step, with so many tokens of prompts in it."""
        at, step, _, size, _, _, of_some, kv_used, kv_total, _, _ = fact
        i = step % CAPACITY
        self._step[i], self._started[i], self._ended[i] = step, at, 0
        self._size[i], self._prefill[i] = size, prompt_tokens
        self._computed[i] = size + (sum([tokens - 1 for _, tokens in of_some]) if of_some else 0)
        self._kv[i] = kv_used / kv_total if kv_total else _NAN
        self.last = step

    def end_step(self, step: int, at: int) -> None:
        """This step is done."""
        i = step % CAPACITY
        if self._step[i] == step:
            self._ended[i] = at

    def subtract_prompt_tokens(self, step: int, fewer: int) -> None:
        """It turned out that there were so many tokens of prompts fewer in this step."""
        self._prefill[step % CAPACITY] -= fewer

    def get_columns(self, first: int, last: int) -> list[Any]:
        """The steps from `first` to `last`, all remembered or missing, as views with the lines of `StepRows`."""
        begin, end = first % CAPACITY, last % CAPACITY + 1
        if begin < end:
            return [self._table[:, begin:end]]
        return [self._table[:, begin:], self._table[:, :end]]

    def latest_steps(self, most: int) -> Any:
        """The last steps, as one table."""
        return np.concatenate(self.get_columns(max(self.last - most, 1), self.last), axis=1)

    def raise_computed_tokens(self, step: int, tokens: int) -> None:
        """So many came out of it: at least as many were computed, whatever was said of that."""
        i = step % CAPACITY
        if self._step[i] == step:
            self._computed[i] = max(self._computed[i], tokens)

    def computed_tokens(self, steps: Any) -> Any:
        """Tokens that were computed in each of these steps, of all requests; 0 = no longer remembered."""
        at = np.asarray(steps) % CAPACITY
        return np.where(self._table[0, at] == steps, self._table[3, at], 0)

    def ended_at(self, step: int) -> int:
        """When this step was done; 0 = not yet, or no longer remembered."""
        i = step % CAPACITY
        return self._ended[i] if self._step[i] == step else 0

    def end_times(self, steps: Any) -> Any:
        """When each of these steps was done; 0 = not yet, or no longer remembered."""
        at = np.asarray(steps) % CAPACITY
        return np.where(self._table[0, at] == steps, self._table[2, at], 0)

    def kv_usage_at(self, step: int) -> float:
        """KV utilisation when this step was scheduled; NaN where it is not known."""
        i = step % CAPACITY
        return self._kv[i] if self._step[i] == step else float("nan")

    def prefill_tokens(self, step: int) -> int:
        """Prompt tokens of all requests in this step."""
        i = step % CAPACITY
        return self._prefill[i] if self._step[i] == step else 0
