"""Which requests are the slowest of their size, as they come. Pure.

A long answer takes long: a request is compared with those of about its prompt and answer (powers of two), by its duration
and by its time to the first token. Quantiles come from DDSketch (Masson et al., VLDB 2019), to 1 %; each class begins anew
after `RENEWED` requests, so that what is slow follows the load.
"""

from __future__ import annotations

from collections import OrderedDict

from ddsketch import DDSketch

from otel_infer.assembly.records.request import RequestRecord

FEWEST = 40
"""Requests of a class before any of it can be called slow."""
RENEWED = 4096
LOOKED_UP_EVERY = 16
MAX_CLASSES = 128
ACCURACY = 0.01


class _Measure:
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
        if self._count >= FEWEST and self._count % LOOKED_UP_EVERY == 0:
            self._limit = (self._sketch.get_quantile_value(1 - share) or 0) * (1 + ACCURACY)
            if self._count >= RENEWED:
                self._sketch, self._count = DDSketch(ACCURACY), 0
        return slow


class Slowest:
    """`share` of the requests of each size, 0 to 1; 0 = none."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._classes: OrderedDict[tuple[int, int], tuple[_Measure, _Measure]] = OrderedDict()

    def has(self, record: RequestRecord) -> bool:
        """Whether this request is one of them; it counts for those after it."""
        if not self._share:
            return False
        size = record.input_tokens.bit_length(), record.output_tokens.bit_length()
        measures = self._classes.get(size)
        if measures is None:
            measures = self._classes[size] = _Measure(), _Measure()
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(size)
        slow = measures[0].is_slow(record.duration_ns, self._share)
        return bool(record.ttft_ns and measures[1].is_slow(record.ttft_ns, self._share)) or slow
