"""Two tapes side by side: what is drawn at once changes nothing but the memory that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.cli.explain import comparison
from otel_infer.ringbuffer import events

MS = 1_000_000


def asked(lengths: list[list[int]], **more: Any) -> list[RequestRecord]:
    """Requests with so many stages of their own each, which take so many ms."""
    names = ("name", "operation", "provider", "model", "engine")
    ids = dict.fromkeys(("trace_id", "span_id", "parent_span_id", "server_span_id"), b"")
    known = {**ids, **dict.fromkeys(names, ""), "sampled": True, "remote_parent": False, "wall_offset": 0}
    return [
        RequestRecord(
            **known,  # type: ignore[arg-type]
            arrived_at=0,
            ended_at=100 * MS,
            outcome=events.OK,
            stages=[Stage("forward", 0, length * MS, {}) for length in each],
            **more,
        )
        for each in lengths
    ]


def test_samples_are_drawn_some_at_a_time_and_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[round(1e6 * value)] for value in np.random.default_rng(1).lognormal(size=500)]
    drawn = []
    for most in (comparison.MAX_VALUES_AT_ONCE, 700, 100):  # the last less than one sample
        monkeypatch.setattr(comparison, "MAX_VALUES_AT_ONCE", most)
        drawn.append(comparison._bootstrap_p95(values, np.random.default_rng(0)))
        assert drawn[-1].shape == (comparison.BOOTSTRAP_SAMPLES,)
    assert np.ptp([np.median(one) for one in drawn]) < 0.05 * np.median(drawn[0])


def test_a_sample_has_all_that_a_request_had_and_its_p95_is_that_of_what_was_drawn() -> None:
    each = [[1, 2], [3], [40, 50, 60, 70]]
    times = comparison._draw_counts(len(each), 50, np.random.default_rng(3))
    drawn = [[value for one, often in zip(each, row) for value in one * often] for row in times.tolist()]
    owner = np.repeat(np.arange(3), [2, 1, 4])
    found = comparison._weighted_percentile(np.concatenate(each), times[:, owner])
    assert found == pytest.approx([np.percentile(values, 95) for values in drawn])
    assert times.sum(axis=1).tolist() == [3] * 50


def test_what_one_request_did_many_times_is_no_evidence() -> None:
    usual = [[10, 10 + number % 3] for number in range(40)]
    rows = comparison.compare_requests(asked(usual), asked([*usual[1:], [500] * 30]))
    (forward,) = [row for row in rows if row.name == "forward"]
    assert forward.after > 400
    assert forward.verdict == "no difference seen"
    every = comparison.compare_requests(asked(usual), asked([[2 * ms for ms in one] for one in usual]))
    assert [row.verdict for row in every if row.name == "forward"] == ["worse"]


def test_fewer_than_twenty_requests_say_nothing_however_often_each_did_something() -> None:
    many = [[10] * 100 for _ in range(19)]
    assert {row.verdict for row in comparison.compare_requests(asked(many), asked(many))} == {"too few"}
    more = [*many, [10]]
    assert {row.verdict for row in comparison.compare_requests(asked(more), asked(more))} == {
        "no difference seen"
    }


def test_tapes_with_other_prompts_or_answers_say_so() -> None:
    alike = asked([[1]] * 3, input_tokens=100, output_tokens=50)
    assert comparison.find_workload_changes(alike, asked([[1]] * 3, input_tokens=110, output_tokens=50)) == []
    (said,) = comparison.find_workload_changes(alike, asked([[1]] * 3, input_tokens=400, output_tokens=50))
    assert said.startswith("the median prompt has 100 tokens before, 400 after")
    assert comparison.find_workload_changes(alike, asked([[1]] * 3)) == []  # nobody said how long they are
