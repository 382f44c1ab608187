"""How far p50, p99 and p99.9 of our histograms are from the truth, each at the scale of what it measures.

The same values go into both forms, through the code that counts them in the sidecar, and their quantiles are read as
Prometheus would. Nothing is timed. A line is the worst of three shapes of load, in draws that each have a seed of their own;
what is bounded by construction is the worst of all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ddsketch import DDSketch

from benchmarks import quantiles
from benchmarks.verdict import Figure, Gate, Line, exactly, line, median
from otel_infer import semconv
from otel_infer.export.metrics.histograms import ExplicitHistogram, ExponentialHistogram
from otel_infer.export.sampling import slow_requests

VALUES, QUICK = 200_000, 20_000
DRAWS, QUICK_DRAWS = 20, 4
QUANTILES = (0.5, 0.99, 0.999)

Draw = Callable[[Any, int], Any]


class Scale(NamedTuple):
    """What a histogram measures: a typical length (s), and how widely it is spread (of the logarithm)."""

    said: str
    metric: semconv.Metric
    typical: float
    spread: float


SCALES = (
    Scale("time to first token", semconv.TIME_TO_FIRST_TOKEN, 0.2, 0.8),
    Scale("time between tokens", semconv.INTER_TOKEN_LATENCY, 0.02, 0.3),
    Scale("time per token", semconv.TIME_PER_OUTPUT_TOKEN, 0.025, 0.4),
    Scale("whole request", semconv.REQUEST_DURATION, 6.0, 1.0),
    Scale("queue", semconv.STAGE_DURATION, 0.005, 1.5),
)


def shapes(scale: Scale) -> dict[str, Draw]:
    """Loads as they are: even, with a second hump of those that were held up, and with a tail without end."""
    typical, spread = scale.typical, scale.spread

    def stalls(chance: Any, count: int) -> Any:
        usual = chance.lognormal(np.log(typical), spread / 2, count)
        held_up = chance.random(count) < 0.02
        return usual + held_up * chance.lognormal(np.log(typical * 8), 0.2, count)

    return {
        "lognormal": lambda chance, count: chance.lognormal(np.log(typical), spread, count),
        "stalls": stalls,
        "Pareto": lambda chance, count: typical / 2 * (1 + chance.pareto(2.0, count)),
    }


def measure(quick: bool) -> list[Line]:
    """Explicit and exponential form of every histogram, and the sketch that says which requests are slow."""
    count, draws = (QUICK, QUICK_DRAWS) if quick else (VALUES, DRAWS)
    rows = []
    for scale in SCALES:
        found = {
            shape: [_errors(scale, draw(np.random.default_rng(seed), count)) for seed in range(draws)]
            for shape, draw in shapes(scale).items()
        }
        rows += _lines(scale, found)
    return [*rows, _sketch(count, draws)]


class Errors(NamedTuple):
    """Of each quantile, as shares of the truth; `allowed`: of the exponential form at the scale that it took."""

    explicit: list[float]
    exponential: list[float]
    allowed: float


def _errors(scale: Scale, values: Any) -> Errors:
    ordered = np.sort(values)
    bounded, growing = ExplicitHistogram(scale.metric.bounds), ExponentialHistogram()
    for histogram in (bounded, growing):
        histogram.record_many(ordered)
    fixed, free = bounded.make_point({}, 0, 0), growing.make_point({}, 0, 0)
    buckets = (free.positive.offset, free.positive.bucket_counts, free.zero_count)
    found = Errors([], [], quantiles.base_of(free.scale) - 1)
    for q in QUANTILES:
        truth = quantiles.exact(ordered, q)
        read = quantiles.explicit(fixed.explicit_bounds, fixed.bucket_counts, q)
        found.explicit.append(quantiles.error(read, truth))
        found.exponential.append(quantiles.error(quantiles.exponential(free.scale, *buckets, q), truth))
    return found


def _lines(scale: Scale, found: dict[str, list[Errors]]) -> list[Line]:
    """Explicit: one row a quantile. Exponential: one, in percent of what its buckets allow."""
    rows = []
    for i, q in enumerate(QUANTILES):
        by_shape = {shape: [one.explicit[i] for one in draws] for shape, draws in found.items()}
        claim = f"{scale.said}: error of p{100 * q:g}, explicit buckets"
        rows.append(line(claim, "%", _worst(by_shape).scaled(100), note=_said(by_shape)))
    flat = {shape: [e for one in draws for e in one.exponential] for shape, draws in found.items()}
    every = [one for draws in found.values() for one in draws]
    used = max(abs(e) / one.allowed for one in every for e in one.exponential)
    claim = f"{scale.said}: largest error of what a bucket allows, exponential"
    note = f"a bucket allows up to {100 * max(one.allowed for one in every):.2g} %; {_said(flat)}"
    return [*rows, line(claim, "%", exactly(100 * used), Gate(100.0), note=note)]


def _worst(by_shape: dict[str, list[float]]) -> Figure:
    """Of the shapes the worst, draw by draw."""
    return median([max(map(abs, draw)) for draw in zip(*by_shape.values())])


def _said(by_shape: dict[str, list[float]]) -> str:
    """The largest error of each shape, with its sign."""
    return ", ".join(f"{shape} {100 * max(found, key=abs):+.2g} %" for shape, found in by_shape.items())


def _sketch(count: int, draws: int) -> Line:
    """The sketch knows no more than `RENEWED` requests at a time."""
    worst = 0.0
    for seed in range(draws):
        values = shapes(SCALES[3])["Pareto"](
            np.random.default_rng(seed), min(count, slow_requests.MAX_SKETCH_REQUESTS)
        )
        sketch = DDSketch(slow_requests.ACCURACY)
        for value in values.tolist():
            sketch.add(value)
        truths = np.quantile(values, QUANTILES, method="lower")
        read = [sketch.get_quantile_value(q) or 0.0 for q in QUANTILES]
        worst = max(worst, *(abs(quantiles.error(*pair)) for pair in zip(read, truths.tolist())))
    claim = "who is slow: largest error of p50, p99, p99.9, streaming sketch"
    return line(claim, "%", exactly(100 * worst), Gate(100 * slow_requests.ACCURACY))
