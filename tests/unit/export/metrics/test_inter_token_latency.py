"""The gaps between tokens, counted for many requests at a time."""

from __future__ import annotations

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.metrics.histograms import HistogramSeries
from otel_infer.export.metrics.inter_token_latency import InterTokenLatency
from tests.support.story import Story


def make_record() -> RequestRecord:
    story = Story()
    a = story.arrives(0, "a", http=False)
    for at in (0, 20, 30):
        story.step(at, at + 10, [a])
    story.ends(50, a)
    return story.record()


def test_request_without_steps_is_refused() -> None:
    """Gaps, losses and exemplars are matched by position, so one request without steps would shift them."""
    latency = InterTokenLatency(HistogramSeries(semconv.INTER_TOKEN_LATENCY, False))
    record = make_record()
    assert isinstance(record.steps, RequestSteps) and np.size(record.gaps_ns()) == 2
    latency.add_request(("a",), record, None)
    record.steps = None
    with pytest.raises(AssertionError):
        latency.add_request(("a",), record, None)
