"""Finds the slowest requests of each size, as they finish. Pure.

A long answer takes long. So a request is compared with requests of similar prompt and answer lengths (powers
of two), by its duration and its time to first token. Quantiles are from DDSketch (Masson et al., VLDB 2019),
with 1 % accuracy. Each class starts anew after `MAX_SKETCH_REQUESTS` requests, so that the threshold follows
the load.
"""

from __future__ import annotations

from collections import OrderedDict

from ddsketch import DDSketch

from otel_infer.assembly.records.request import RequestRecord

MIN_REQUESTS = 40
"""Requests of a class before any of its requests counts as slow."""
MAX_SKETCH_REQUESTS = 4096
UPDATE_EVERY = 16
MAX_CLASSES = 128
ACCURACY = 0.01
NO_TOKENS = 0, 0
"""The size class of requests without known tokens."""


def find_size_class(record: RequestRecord) -> tuple[int, int]:
    """Returns the powers of two below the lengths of its prompt and of its answer."""
    return record.input_tokens.bit_length(), record.output_tokens.bit_length()


class _SlowThreshold:
    """The threshold for one duration of the requests in a class."""

    def __init__(self) -> None:
        self._sketch = DDSketch(ACCURACY)
        self._new: list[int] = []
        self._count = 0
        self._limit = float("inf")

    def is_slow(self, length: int, share: float) -> bool:
        """Returns whether this duration is among the slowest `share` of the previous ones, and adds it."""
        slow = length > self._limit
        self._new.append(length)
        if len(self._new) == UPDATE_EVERY:
            self._update_limit(share)
        return slow

    def _update_limit(self, share: float) -> None:
        for length in self._new:
            self._sketch.add(length)
        self._count, self._new = self._count + UPDATE_EVERY, []
        if self._count >= MIN_REQUESTS:
            self._limit = (self._sketch.get_quantile_value(1 - share) or 0) * (1 + ACCURACY)
        if self._count >= MAX_SKETCH_REQUESTS:
            self._sketch, self._count = DDSketch(ACCURACY), 0


class SlowRequestDetector:
    """Detects the slowest `share` of the requests of each size, 0 to 1; 0 = none."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._size_classes: OrderedDict[tuple[int, int], tuple[_SlowThreshold, _SlowThreshold]] = (
            OrderedDict()
        )

    def is_slow(self, record: RequestRecord) -> bool:
        """Returns whether this request is slow, and counts it for later requests."""
        return self.is_slow_length(find_size_class(record), record.duration_ns, record.ttft_ns)

    def is_slow_length(self, size: tuple[int, int], duration_ns: int, ttft_ns: int) -> bool:
        """Returns whether a request of this size class is slow, and counts it. `ttft_ns`: 0 = it had no token."""
        if not self._share:
            return False
        thresholds = self._size_classes.get(size)
        if thresholds is None:
            thresholds = self._size_classes[size] = _SlowThreshold(), _SlowThreshold()
            if len(self._size_classes) > MAX_CLASSES:
                self._size_classes.popitem(last=False)
        self._size_classes.move_to_end(size)
        is_slow_duration = thresholds[0].is_slow(duration_ns, self._share)
        return bool(ttft_ns and thresholds[1].is_slow(ttft_ns, self._share)) or is_slow_duration
