"""Which requests are the slowest of their size, as they come. Pure.

A long answer takes long: a request is compared with those of about its prompt and answer (powers of two), by its duration
and by its time to the first token. Quantiles come from DDSketch (Masson et al., VLDB 2019), to 1 %; each class begins anew
after `RENEWED` requests, so that what is slow follows the load.
"""

from __future__ import annotations

from collections import OrderedDict

from ddsketch import DDSketch

from otel_infer.assembly.records.request import RequestRecord

MIN_REQUESTS = 40
"""Requests of a class before any of it can be called slow."""
MAX_SKETCH_REQUESTS = 4096
UPDATE_EVERY = 16
MAX_CLASSES = 128
ACCURACY = 0.01


class _SlowThreshold:
    """One length of the requests of a class."""

    def __init__(self) -> None:
        self._sketch = DDSketch(ACCURACY)
        self._count = 0
        self._limit = float("inf")

    def is_slow(self, length: int, share: float) -> bool:
        """Whether this one is among the slowest `share`, by those before it; counts it."""
        slow = length > self._limit
        self._sketch.add(length)
        self._count += 1
        if self._count >= MIN_REQUESTS and self._count % UPDATE_EVERY == 0:
            self._limit = (self._sketch.get_quantile_value(1 - share) or 0) * (1 + ACCURACY)
            if self._count >= MAX_SKETCH_REQUESTS:
                self._sketch, self._count = DDSketch(ACCURACY), 0
        return slow


class SlowRequestDetector:
    """`share` of the requests of each size, 0 to 1; 0 = none."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._size_classes: OrderedDict[tuple[int, int], tuple[_SlowThreshold, _SlowThreshold]] = (
            OrderedDict()
        )

    def is_slow(self, record: RequestRecord) -> bool:
        """Whether this request is one of them; it counts for those after it."""
        if not self._share:
            return False
        size = record.input_tokens.bit_length(), record.output_tokens.bit_length()
        measures = self._size_classes.get(size)
        if measures is None:
            measures = self._size_classes[size] = _SlowThreshold(), _SlowThreshold()
            if len(self._size_classes) > MAX_CLASSES:
                self._size_classes.popitem(last=False)
        self._size_classes.move_to_end(size)
        slow = measures[0].is_slow(record.duration_ns, self._share)
        return bool(record.ttft_ns and measures[1].is_slow(record.ttft_ns, self._share)) or slow
