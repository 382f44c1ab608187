"""Two tapes are compared by bootstrap samples of their requests."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.cli.explain import comparison
from otel_infer.ringbuffer import events

MS = 1_000_000


def make_requests(stage_lengths_ms: list[list[int]], **more: Any) -> list[RequestRecord]:
    """Returns one request per list; a list holds the lengths of its `forward` stages."""
    names = ("name", "operation", "provider", "model", "engine")
    ids = dict.fromkeys(("trace_id", "span_id", "parent_span_id", "server_span_id"), b"")
    known = {**ids, **dict.fromkeys(names, ""), "sampled": True, "remote_parent": False, "wall_offset": 0}
    return [
        RequestRecord(
            **known,  # type: ignore[arg-type]
            arrived_at=0,
            ended_at=100 * MS,
            outcome=events.OK,
            stages=[Stage("forward", 0, length * MS, {}) for length in lengths],
            **more,
        )
        for lengths in stage_lengths_ms
    ]


def test_bootstrap_does_not_depend_on_the_draw_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of values drawn at once changes only the memory."""
    values = [[round(1e6 * value)] for value in np.random.default_rng(1).lognormal(size=500)]
    drawn = []
    for limit in (comparison.MAX_VALUES_AT_ONCE, 700, 100):  # the last limit is below one sample
        monkeypatch.setattr(comparison, "MAX_VALUES_AT_ONCE", limit)
        drawn.append(comparison._bootstrap_p95(values, np.random.default_rng(0)))
        assert drawn[-1].shape == (comparison.BOOTSTRAP_SAMPLES,)
    assert np.ptp([np.median(sample) for sample in drawn]) < 0.05 * np.median(drawn[0])


def test_weighted_percentile_equals_numpy_percentile() -> None:
    """A sample has all values of each drawn request."""
    values_by_request = [[1, 2], [3], [40, 50, 60, 70]]
    counts = comparison._draw_counts(len(values_by_request), 50, np.random.default_rng(3))
    drawn = [
        [value for values, count in zip(values_by_request, row) for value in values * count]
        for row in counts.tolist()
    ]
    owner = np.repeat(np.arange(3), [2, 1, 4])
    found = comparison._weighted_percentile(np.concatenate(values_by_request), counts[:, owner])
    assert found == pytest.approx([np.percentile(values, 95) for values in drawn])
    assert counts.sum(axis=1).tolist() == [3] * 50


def test_many_slow_stages_of_one_request_are_inconclusive() -> None:
    usual = [[10, 10 + number % 3] for number in range(40)]
    rows = comparison.compare_requests(make_requests(usual), make_requests([*usual[1:], [500] * 30]))
    (forward,) = [row for row in rows if row.name == "forward"]
    assert forward.after > 400
    assert forward.verdict == "no difference seen"
    every = comparison.compare_requests(
        make_requests(usual), make_requests([[2 * ms for ms in lengths] for lengths in usual])
    )
    assert [row.verdict for row in every if row.name == "forward"] == ["worse"]


def test_fewer_than_20_requests_give_no_verdict() -> None:
    """The number of stages per request does not matter."""
    many = [[10] * 100 for _ in range(19)]
    assert {row.verdict for row in comparison.compare_requests(make_requests(many), make_requests(many))} == {
        "too few"
    }
    more = [*many, [10]]
    assert {row.verdict for row in comparison.compare_requests(make_requests(more), make_requests(more))} == {
        "no difference seen"
    }


def test_different_prompt_lengths_are_reported() -> None:
    alike = make_requests([[1]] * 3, input_tokens=100, output_tokens=50)
    assert (
        comparison.find_workload_changes(alike, make_requests([[1]] * 3, input_tokens=110, output_tokens=50))
        == []
    )
    (change,) = comparison.find_workload_changes(
        alike, make_requests([[1]] * 3, input_tokens=400, output_tokens=50)
    )
    assert re.search("prompt.* 100 .* 400 ", change)
    assert comparison.find_workload_changes(alike, make_requests([[1]] * 3)) == []  # the lengths are unknown
