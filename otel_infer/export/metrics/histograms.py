"""Counts values into histograms, as data points of the SDK: explicit bounds, or exponential with base 2.

An instrument's `record()` costs microseconds per value, and a request has a value per token. So the values of
a request are sorted and counted together. Buckets are those of the OpenTelemetry data model (upper bounds are
inclusive). The exponential index equals the SDK's to the last bit. Negative and non-finite values are
ignored.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
from opentelemetry.sdk.metrics import export

from otel_infer import semconv
from otel_infer.ringbuffer.events import Value, make_tuple

try:
    from opentelemetry.sdk.metrics import Exemplar
except ImportError:  # SDK 1.27, whose data points have no exemplars
    Exemplar = None  # type: ignore[assignment, misc]

MAX_BUCKETS = 160
MAX_SCALE = 20

MAX_SERIES = 2000
"""Maximum attribute sets of one metric. Later sets are counted in one further series, marked as overflow."""

Label = Union[str, bool, int, float, None]
Key = tuple[Label, ...]
"""The values of the attributes that a metric may have, in their order; None = absent."""
OVERFLOW_KEY: Key = (semconv.METRIC_OVERFLOW,)


class ExemplarSource(NamedTuple):
    """The source of a value: an exported span, and when its request ended (unix ns)."""

    trace_id: int
    span_id: int
    at: int


def make_source(trace_id: bytes, span_id: bytes, at: int) -> ExemplarSource | None:
    """Returns the source with these ids; None if one of them is zero."""
    ids = int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big")
    return make_tuple(ExemplarSource, (*ids, at)) if all(ids) else None


def _no_source(position: int) -> None:
    """Returns None: the value has no span."""


class Histogram:
    """Base of both forms. The exemplar of a bucket is its latest value that has a source."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.min, self.max = math.inf, -math.inf
        self._exemplars: dict[int, tuple[float, ExemplarSource]] = {}

    def record(self, value: float, source: ExemplarSource | None = None) -> None:
        """Counts one value."""
        if not 0 <= value < math.inf:
            return
        self.count += 1
        self.sum += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value
        bucket = self._count_value(value)
        if source is not None:
            self._exemplars[bucket] = (value, source)

    def record_many(self, values: Any, source: Callable[[int], ExemplarSource | None] = _no_source) -> None:
        """Counts a sorted numpy array of values. The largest value of each bucket may become its exemplar.

        `source`: returns the source of the value at a position.
        """
        begin = 0
        if len(values) and not (values[0] >= 0 and values[-1] < math.inf):  # NaN sorts last
            begin, end = int(values.searchsorted(0.0)), int(values.searchsorted(math.inf))
            values = values[begin:end]
        if len(values) == 0:
            return
        self.count += len(values)
        self.sum += float(values.sum())
        self.min, self.max = min(self.min, float(values[0])), max(self.max, float(values[-1]))
        for bucket, largest in self._count_sorted(values):
            found_source = source(begin + largest)
            if found_source is not None:
                self._exemplars[bucket] = (float(values[largest]), found_source)

    def make_point(self, attributes: Mapping[str, Value], started_at: int, now: int) -> Any:
        """Returns the SDK's data point for all values since `started_at`; instants in unix ns."""
        raise NotImplementedError

    def _count_value(self, value: float) -> int:
        """Counts a value and returns its bucket."""
        raise NotImplementedError

    def _count_sorted(self, values: Any) -> Iterable[tuple[int, int]]:
        """Counts values and returns (bucket, position of its largest value) for every changed bucket."""
        raise NotImplementedError

    def _make_point_fields(
        self, attributes: Mapping[str, Value], started_at: int, now: int
    ) -> dict[str, Any]:
        """Returns the fields that both kinds of data points have."""
        fields: dict[str, Any] = {"count": self.count, "sum": self.sum}
        fields.update(min=self.min if self.count else None, max=self.max if self.count else None)
        fields.update(attributes=attributes, start_time_unix_nano=started_at, time_unix_nano=now)
        if Exemplar is not None:
            # By time: a native histogram of Prometheus refuses an exemplar older than the one before it.
            latest = sorted(self._exemplars.values(), key=lambda exemplar: exemplar[1].at)
            fields["exemplars"] = [_make_exemplar(value, source) for value, source in latest]
        return fields


class ExplicitHistogram(Histogram):
    """Bucket i holds the values above bound i-1 and up to bound i."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds, self._edges = bounds, np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)

    def make_point(
        self, attributes: Mapping[str, Value], started_at: int, now: int
    ) -> export.HistogramDataPoint:
        """Returns a data point with one more count than there are bounds."""
        return export.HistogramDataPoint(
            bucket_counts=tuple(self._counts),
            explicit_bounds=self._bounds,
            **self._make_point_fields(attributes, started_at, now),
        )

    def _count_value(self, value: float) -> int:
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        return bucket

    def _count_sorted(self, values: Any) -> Iterable[tuple[int, int]]:
        ends = [*values.searchsorted(self._edges, "right").tolist(), len(values)]
        touched = []
        before = 0
        for bucket, end in enumerate(ends):
            if end > before:
                self._counts[bucket] += end - before
                touched.append((bucket, end - 1))
                before = end
        return touched


_ZERO_BUCKET = -(1 << 62)
"""The bucket of zeros, beside the exponential buckets."""


class ExponentialHistogram(Histogram):
    """Bucket i holds base**i < value ≤ base**(i+1), where base is 2**(2**-scale).

    The scale starts at 20 and falls whenever the values span more than 160 buckets.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scale = MAX_SCALE
        self._zero_count = 0
        self._offset = 0
        self._counts: list[int] = []

    def make_point(
        self, attributes: Mapping[str, Value], started_at: int, now: int
    ) -> export.ExponentialHistogramDataPoint:
        """Returns a data point whose first and last buckets are not empty."""
        return export.ExponentialHistogramDataPoint(
            scale=self._scale if self._counts else 0,
            zero_count=self._zero_count,
            positive=export.Buckets(offset=self._offset, bucket_counts=tuple(self._counts)),
            negative=export.Buckets(offset=0, bucket_counts=()),
            flags=0,
            **self._make_point_fields(attributes, started_at, now),
        )

    def _count_value(self, value: float) -> int:
        if value == 0:
            self._zero_count += 1
            return _ZERO_BUCKET
        index = bucket_of_value(value, self._scale)
        while not self._make_room(index, index):
            index = bucket_of_value(value, self._scale)
        self._counts[index - self._offset] += 1
        return index

    def _count_sorted(self, values: Any) -> Iterable[tuple[int, int]]:
        zeroes = int(values.searchsorted(0.0, "right"))
        self._zero_count += zeroes
        touched = [(_ZERO_BUCKET, zeroes - 1)] if zeroes else []
        positive = values[zeroes:]
        if len(positive) == 0:
            return touched
        indexes = buckets_of_values(positive, self._scale)
        while not self._make_room(int(indexes.min()), int(indexes.max())):
            indexes = buckets_of_values(positive, self._scale)
        last = np.append(np.flatnonzero(indexes[1:] != indexes[:-1]), len(indexes) - 1)
        before = -1
        for index, end in zip(indexes[last].tolist(), last.tolist()):
            self._counts[index - self._offset] += end - before
            touched.append((index, zeroes + end))
            before = end
        return touched

    def _make_room(self, low: int, high: int) -> bool:
        """Extends the buckets to these indexes and returns True.

        Returns False if the scale was reduced, so the indexes are void.
        """
        if self._counts:
            low, high = min(low, self._offset), max(high, self._offset + len(self._counts) - 1)
        fall = 0
        while (high >> fall) - (low >> fall) >= MAX_BUCKETS:
            fall += 1
        if fall:
            self._reduce_scale(fall)
            return False
        if self._counts:
            self._counts[:0] = [0] * (self._offset - low)
        self._counts.extend([0] * (high - low + 1 - len(self._counts)))
        self._offset = low
        return True

    def _reduce_scale(self, fall: int) -> None:
        counts, offset, exemplars = self._counts, self._offset, self._exemplars
        self._scale -= fall
        self._offset = offset >> fall
        self._counts = [0] * (((offset + len(counts) - 1) >> fall) - self._offset + 1) if counts else []
        for index, count in enumerate(counts, offset):
            self._counts[(index >> fall) - self._offset] += count
        self._exemplars = {}
        for index, exemplar in sorted(exemplars.items(), key=lambda item: item[1][1].at):
            self._exemplars[index if index == _ZERO_BUCKET else index >> fall] = exemplar


class HistogramSeries:
    """The series of a histogram metric."""

    def __init__(self, metric: semconv.Metric, exponential: bool) -> None:
        self._metric, self._exponential = metric, exponential
        self._histograms: dict[Key, Histogram] = {}
        names = metric.attributes
        self._error_position = names.index(semconv.ERROR_TYPE) if semconv.ERROR_TYPE in names else len(names)
        self._error_series_read: dict[str, set[Key]] = {}

    def get_or_create(self, key: Key) -> Histogram:
        """Returns the histogram of this key, and creates it on first use."""
        known = self._histograms.get(key)
        if known is not None:
            return known
        if len(self._histograms) >= MAX_SERIES:
            key = OVERFLOW_KEY
        return self._histograms.setdefault(key, self._make_empty())

    def _make_empty(self) -> Histogram:
        return ExponentialHistogram() if self._exponential else ExplicitHistogram(self._metric.bounds)

    def collect_data(
        self, temporality: export.AggregationTemporality, since: int, now: int, reader: str = ""
    ) -> Any:
        """Returns the SDK's data of this metric, None if nothing was counted.

        Delta temporality resets the counts. Of a cumulative series with `error.type`, each `reader` first
        gets an empty point, because `rate()` counts only what follows the first point; "" = no such point.
        """
        is_delta = temporality is export.AggregationTemporality.DELTA
        counted = {key: histogram for key, histogram in self._histograms.items() if histogram.count}
        if reader and not is_delta:
            counted.update((key, self._make_empty()) for key in self._take_new_errors(counted, reader))
        points = [
            histogram.make_point(key_to_attributes(self._metric, key), since, now)
            for key, histogram in counted.items()
        ]
        if is_delta:
            self._histograms = {}
        if not points:
            return None
        form = export.ExponentialHistogram if self._exponential else export.Histogram
        return form(data_points=points, aggregation_temporality=temporality)

    def _take_new_errors(self, keys: Iterable[Key], reader: str) -> set[Key]:
        """Returns the keys with an error type that `reader` gets for the first time."""
        at, read = self._error_position, self._error_series_read.setdefault(reader, set())
        new = {key for key in keys if len(key) > at and key[at] is not None} - read
        read |= new
        return new


def key_to_attributes(metric: semconv.Metric, key: Key) -> dict[str, Any]:
    """Returns the attributes of the series with this key."""
    if key is OVERFLOW_KEY:
        return {semconv.METRIC_OVERFLOW: True}
    return {name: value for name, value in zip(metric.attributes, key) if value is not None}


def _make_exemplar(value: float, source: ExemplarSource) -> Exemplar:
    trace_id, span_id, at = source
    return Exemplar(
        filtered_attributes={}, value=value, time_unix_nano=at, span_id=span_id, trace_id=trace_id
    )


def bucket_of_value(value: float, scale: int) -> int:
    """Returns the bucket of a positive value like the SDK: by its logarithm, but exact for powers of two."""
    value = max(value, sys.float_info.min)
    mantissa, exponent = math.frexp(value)
    is_power = mantissa == 0.5
    if scale <= 0:
        return (exponent - 1 - is_power) >> -scale
    if is_power:
        return ((exponent - 1) << scale) - 1
    index = math.floor(math.log(value) * math.ldexp(1 / math.log(2), scale))
    return min(index, (sys.float_info.max_exp << scale) - 1)


def buckets_of_values(values: Any, scale: int) -> Any:
    """Returns `bucket_of_value` for each value of a numpy array, as int64.

    The logarithms of numpy and the C library may differ in the last bits. So values that close to a bucket's
    edge are computed by the C library.
    """
    values = np.maximum(values, sys.float_info.min)
    mantissas, exponents = np.frexp(values)
    powers = mantissas == 0.5
    exponents = exponents.astype(np.int64) - 1
    if scale <= 0:
        return (exponents - powers) >> -scale
    exact = np.log(values) * math.ldexp(1 / math.log(2), scale)
    indexes = np.where(powers, (exponents << scale) - 1, np.floor(exact).astype(np.int64))
    unsure = ~powers & (np.abs(exact - np.rint(exact)) <= 8 * np.spacing(np.abs(exact)))
    for i in np.flatnonzero(unsure):
        indexes[i] = bucket_of_value(float(values[i]), scale)
    return np.minimum(indexes, (sys.float_info.max_exp << scale) - 1)
