"""Tail sampling: the budget of step spans is never exceeded, and a part of it is reserved for failures."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
from otel_infer.assembly.records.missed_objectives import find_missed_objectives, measure_durations
from otel_infer.assembly.records.request import (
    Interferer,
    LatencyBreakdown,
    PrefillStep,
    RequestRecord,
    Stage,
)
from otel_infer.config import slo
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.sampling.tail_sampler import (
    BURST_SECONDS,
    MAX_STEPS_PER_TRACE,
    RESERVED_SHARE,
    Decision,
    TailSampler,
)
from otel_infer.ringbuffer import events
from tests.support.story import Story

SECOND = 1_000_000_000


def finished(
    steps: int = 0,
    at: int = SECOND,
    *,
    trace: int = 1,
    outcome: int = events.OK,
    sampled: bool = True,
    chunks: int = 1,
) -> RequestRecord:
    """A request with this many decode steps, and a prompt in this many chunks."""
    rows = np.arange(1, steps + 2)
    fields: dict[str, Any] = {
        "trace_id": trace.to_bytes(16, "big"),
        "sampled": sampled,
        "outcome": outcome,
        "ended_at": at,
        "steps": RequestSteps(np.array([rows] * 6)),
        "prefill_steps": [PrefillStep(number, 1, 2, 3, 4) for number in range(chunks)],
        "stages": [Stage("decode", 1, 2, {})] if steps else [],
    }
    names = ("name", "operation", "provider", "model", "engine")
    ids = {"span_id": b"s" * 8, "parent_span_id": b"", "server_span_id": b"", "remote_parent": False}
    return RequestRecord(**{**ids, **dict.fromkeys(names, ""), "arrived_at": 0, "wall_offset": 0, **fields})


def step_span_count(decision: Decision, record: RequestRecord) -> int:
    return decision.steps + len(record.prefill_steps) * decision.prefill_steps


def auto_sampler(budget: int = 2000, keep_unsampled: bool = False, ratio: bool = False) -> TailSampler:
    return TailSampler("auto", budget, keep_unsampled, ratio)


# ── export of requests ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["all", "auto", "off"])
@pytest.mark.parametrize("outcome", [events.OK, events.ERROR])
def test_unsampled_request_is_dropped_without_cost(mode: str, outcome: int) -> None:
    sampler = TailSampler(mode, 10, keep_unsampled=False, ratio=False)
    for _ in range(100):
        decision = sampler.make_decision(finished(50, sampled=False, outcome=outcome))
        assert decision == Decision(False, 0, "unsampled")
    assert sampler.dropped_steps.total() == 0
    assert sampler.make_decision(finished(50)).steps == (0 if mode == "off" else 50)


@pytest.mark.parametrize(("sampled", "reason"), [(True, "none"), (False, "unsampled")])
def test_redundant_request_span_is_not_exported(sampled: bool, reason: str) -> None:
    record = finished(sampled=sampled)
    record.redundant = True
    sampler = auto_sampler()
    assert (sampler.is_exported(record), sampler.make_decision(record)) == (False, Decision(False, 0, reason))


@pytest.mark.parametrize("sampled", [True, False])
def test_missed_objective_does_not_depend_on_sampling(sampled: bool) -> None:
    sampler = TailSampler("off", 0, False, False, slo.parse_objectives("e2e=1us"))
    decision = sampler.make_decision(finished(50, sampled=sampled))
    assert (decision.export, decision.missed) == (sampled, ("e2e",))


def test_keep_unsampled_exports_unsampled_requests() -> None:
    assert auto_sampler(keep_unsampled=True).make_decision(finished(5, sampled=False)) == Decision(
        True, 5, "budget"
    )


# ── export of steps ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcome", "ratio", "reason"),
    [
        (events.OK, False, "budget"),
        (events.OK, True, "sampled"),
        (events.ERROR, False, "error"),
        (events.ABORTED, True, "aborted"),
    ],
)
def test_low_load_keeps_all_steps_with_a_reason(outcome: int, ratio: bool, reason: str) -> None:
    assert auto_sampler(ratio=ratio).make_decision(finished(300, outcome=outcome)) == Decision(
        True, 300, reason
    )


@pytest.mark.parametrize(
    ("outcome", "reason"), [(events.OK, "all"), (events.ERROR, "error"), (events.ABORTED, "aborted")]
)
def test_mode_all_ignores_the_budget(outcome: int, reason: str) -> None:
    sampler = TailSampler("all", 1, keep_unsampled=False, ratio=False)
    for _ in range(3):
        assert sampler.make_decision(finished(50_000, outcome=outcome, chunks=3)) == Decision(
            True, 50_000, reason, True
        )
    assert sampler.dropped_steps.total() == 0


def test_mode_all_with_share_keeps_steps_of_failures() -> None:
    sampler = TailSampler("all", 1, keep_unsampled=False, ratio=False)
    sampler.share = 0.25
    traces = [number << 120 | 1 for number in range(256)]
    final = [decided for trace in traces for decided in sampler.add(finished(10, trace=trace))]
    assert [decided.decision.reason for decided in final] == ["all"] * 64 + ["none"] * 192
    assert sampler.dropped_steps == {"none": 1920}
    assert sampler.make_decision(finished(10, trace=traces[-1], outcome=events.ERROR)) == Decision(
        True, 10, "error"
    )


def test_share_scales_the_budget() -> None:
    sampler = auto_sampler(budget=100)
    sampler.share = 0.5
    assert sampler.make_decision(finished(1000, SECOND, trace=1)).steps > 0
    decided = sum(
        sampler.make_decision(finished(100, SECOND * (2 + n), trace=10 + n)).steps for n in range(100)
    )
    assert decided <= 50 * 110


@pytest.mark.parametrize("outcome", [events.OK, events.ERROR])
def test_mode_off_exports_requests_without_steps(outcome: int) -> None:
    sampler = TailSampler("off", 2000, keep_unsampled=False, ratio=False)
    assert sampler.make_decision(finished(50, outcome=outcome, chunks=3)) == Decision(True, 0, "none")


def test_first_step_is_the_prefill_and_free() -> None:
    assert auto_sampler(budget=0).make_decision(finished(0)) == Decision(True, 0, "budget")


def test_prompt_chunks_count_as_step_spans() -> None:
    sampler = auto_sampler()
    assert sampler.make_decision(finished(10, chunks=5, trace=1)) == Decision(True, 10, "budget", True)
    assert sampler.make_decision(finished(990, chunks=1, trace=1)).steps == 985


def test_prompt_chunks_are_kept_entirely_or_dropped() -> None:
    sampler = auto_sampler(budget=0)
    sampler._bucket.tokens = 7.0
    ((_, decision),) = sampler.add(finished(4, chunks=8))
    assert (decision.steps, decision.prefill_steps) == (4, False)
    assert sampler.dropped_steps.total() == 8


def test_decode_steps_without_a_decode_stage_are_free() -> None:
    record = finished(10)
    record.stages = []
    assert auto_sampler().make_decision(record) == Decision(True, 0, "budget")


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────

histories = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 2 * SECOND)),
        st.integers(0, 1500),
        st.sampled_from([events.OK, events.OK, events.ERROR, events.ABORTED]),
        st.integers(0, 4),
        st.integers(1, 5),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(histories, st.integers(0, 300))
def test_steps_per_window_stay_within_budget_and_burst(
    history: list[tuple[int, int, int, int, int]], budget: int
) -> None:
    sampler, at, decided = auto_sampler(budget), SECOND, []
    for gap, steps, outcome, trace, chunks in history:
        at += gap
        record = finished(steps, at, trace=trace, outcome=outcome, chunks=chunks)
        decided.append((at, step_span_count(sampler.make_decision(record), record)))
    for begin, end in itertools.combinations_with_replacement(range(len(decided)), 2):
        seconds = (decided[end][0] - decided[begin][0]) / SECOND
        steps = sum(count for _, count in decided[begin : end + 1])
        assert steps <= budget * BURST_SECONDS + budget * seconds + 1e-6


@settings(max_examples=100)
@given(histories, st.integers(0, 300))
def test_exported_and_dropped_steps_sum_to_all(
    history: list[tuple[int, int, int, int, int]], budget: int
) -> None:
    sampler, at, wanted, final = auto_sampler(budget), SECOND, 0, []
    counts = [0]
    for gap, steps, outcome, trace, chunks in history:
        at += gap
        wanted += steps + (chunks if chunks > 1 else 0)
        final += sampler.add(finished(steps, at, trace=trace, outcome=outcome, chunks=chunks))
        counts.append(sampler.dropped_steps.total())
    final += sampler.flush_held(at, 1 << 62)
    for record, decision in final:
        assert decision.export
        assert 0 <= decision.steps <= tail_sampler._count_decode_steps(record)
        assert decision.reason in semconv.KEEP_REASONS
    assert sampler.dropped_steps.total() == wanted - sum(
        step_span_count(decision, record) for record, decision in final
    )
    assert counts == sorted(counts)  # a decreasing counter would be read as a reset


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, 900)), max_size=60), st.integers(4, 300))
def test_reserve_remains_available_for_failures(history: list[tuple[int, int]], budget: int) -> None:
    sampler, at = auto_sampler(budget), SECOND
    for number, (gap, steps) in enumerate(history):
        at += gap
        sampler.make_decision(finished(steps, at, trace=number))
    reserved = min(int(budget * BURST_SECONDS * RESERVED_SHARE), MAX_STEPS_PER_TRACE)
    assert sampler.make_decision(finished(reserved, at, trace=9999, outcome=events.ERROR)) == Decision(
        True, reserved, "error"
    )


def test_ordinary_requests_do_not_use_the_reserve() -> None:
    sampler = auto_sampler(budget=40)
    decided = [sampler.make_decision(finished(100, trace=number)) for number in range(10)]
    assert [(decision.reason, decision.steps) for decision in decided[:4]] == [
        ("budget", 100),
        ("budget", 100),
        ("baseline", 100),
        ("none", 0),
    ]
    assert decided[-1] == Decision(True, 0, "none")
    assert sampler.make_decision(finished(100, trace=99, outcome=events.ABORTED)) == Decision(
        True, 100, "aborted"
    )
    assert sampler.make_decision(finished(100, trace=98, outcome=events.ERROR)) == Decision(True, 0, "error")


def test_budget_refills_over_time() -> None:
    sampler = auto_sampler(budget=100)
    assert sum(sampler.make_decision(finished(900, trace=number)).steps for number in range(3)) == 750
    assert sampler.make_decision(finished(900, SECOND, trace=7)).steps == 0
    assert sampler.make_decision(finished(900, 3 * SECOND, trace=8)).steps == 75
    assert sampler.make_decision(finished(900, 1000 * SECOND, trace=9)).steps == 750


def test_late_event_does_not_refill_the_budget() -> None:
    sampler = auto_sampler(budget=100)
    for number in range(3):
        sampler.make_decision(finished(900, 100 * SECOND, trace=number))
    assert sampler.make_decision(finished(900, 50 * SECOND, trace=7)).steps == 0
    assert sampler.make_decision(finished(900, 100 * SECOND, trace=8)).steps == 0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1500), st.integers(1, 9)), max_size=40))
def test_trace_has_at_most_a_thousand_step_spans(
    history: list[tuple[int, int, int]],
) -> None:
    sampler = auto_sampler(budget=1_000_000)
    per_trace: dict[int, int] = {}
    for trace, steps, chunks in history:
        record = finished(steps, trace=trace, chunks=chunks)
        per_trace[trace] = per_trace.get(trace, 0) + step_span_count(sampler.make_decision(record), record)
    assert all(count <= MAX_STEPS_PER_TRACE for count in per_trace.values())


def test_traces_are_evicted_least_recently_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_sampler, "MAX_TRACES", 3)
    sampler = auto_sampler(budget=1_000_000)
    for trace in (1, 2, 3, 1, 4):
        sampler.make_decision(finished(1000, trace=trace))
    assert sampler.make_decision(finished(10, trace=1)).steps == 0
    assert sampler.make_decision(finished(10, trace=2)).steps == 10


# ── requests that explain others ─────────────────────────────────────────────────────────────────────────────────


def with_span_id(span: str, record: RequestRecord) -> RequestRecord:
    record.span_id = span.encode().ljust(8)
    return record


def delayed_by(span: str, record: RequestRecord) -> RequestRecord:
    record.breakdown = LatencyBreakdown({"interference": 1}, Interferer(b"t" * 16, span.encode().ljust(8), 1))
    return record


def reasons_by_span(sampler: TailSampler, *records: RequestRecord, oldest_live: int = 0) -> dict[str, str]:
    """Returns the reasons of the requests that are decided now, by span. The time is the latest end."""
    final = [decided for record in records for decided in sampler.add(record)]
    final += sampler.flush_held(max((record.ended_at for record in records), default=0), oldest_live)
    return {decided.record.span_id.decode().strip(): decided.decision.reason for decided in final}


def busy_sampler(budget: int = 100, **more: Any) -> TailSampler:
    """A sampler without budget for ordinary requests, and with no baseline due."""
    sampler = TailSampler("auto", budget, False, False, **more)
    sampler._bucket.tokens = budget * BURST_SECONDS * RESERVED_SHARE
    sampler._bucket._refilled_at = SECOND
    sampler._baseline_at[0, 0] = SECOND
    return sampler


def test_missed_objectives_are_the_reason() -> None:
    sampler = TailSampler("auto", 2000, False, False, slo.parse_objectives("e2e=100ms,queue=1ms"))
    record = finished(5, at=SECOND)
    record.stages.append(Stage("queue", 0, 2_000_000, {}))
    assert sampler.make_decision(record) == Decision(True, 5, "slo", missed=("e2e", "queue"), slow=True)
    assert sampler.make_decision(finished(5, at=1000)) == Decision(True, 5, "budget")


def test_preempted_and_slow_requests_bypass_the_budget() -> None:
    sampler = busy_sampler(slow_share=0.05)
    for number in range(100):
        assert sampler.make_decision(finished(10, SECOND, trace=number)).reason == "none"
    preempted = finished(10, SECOND, trace=200)
    preempted.preemptions = 1
    assert sampler.make_decision(preempted) == Decision(True, 10, "preempted")
    assert sampler.make_decision(finished(10, 3 * SECOND, trace=201)) == Decision(True, 10, "slow", slow=True)


def test_held_request_is_kept_when_named_interferer() -> None:
    sampler = busy_sampler()
    assert (
        reasons_by_span(
            sampler,
            with_span_id("heavy", finished(10, trace=1)),
            with_span_id("other", finished(10, trace=2)),
        )
        == {}
    )
    delayed = delayed_by(
        "heavy", with_span_id("delayed", finished(10, SECOND + 1, trace=3, outcome=events.ERROR))
    )
    assert reasons_by_span(sampler, delayed) == {"delayed": "error", "heavy": "interferer"}
    assert reasons_by_span(sampler, oldest_live=2 * SECOND) == {"other": "none"}
    assert sampler.dropped_steps == {"none": 10}


def test_interferer_named_before_its_end_is_kept() -> None:
    sampler = busy_sampler()
    delayed = delayed_by("heavy", with_span_id("delayed", finished(10, trace=3, outcome=events.ERROR)))
    assert reasons_by_span(sampler, delayed) == {"delayed": "error"}
    assert reasons_by_span(sampler, with_span_id("heavy", finished(10, SECOND, trace=4))) == {
        "heavy": "interferer"
    }


def test_pending_interferer_expires_with_requests_in_flight() -> None:
    sampler = busy_sampler()
    delayed = delayed_by(
        "heavy", with_span_id("delayed", finished(10, SECOND, trace=3, outcome=events.ERROR))
    )
    assert reasons_by_span(sampler, delayed, oldest_live=delayed.ended_at) == {"delayed": "error"}
    assert list(sampler._pending_interferers) == [b"heavy   "]
    sampler.flush_held(2 * SECOND, oldest_live=delayed.ended_at + 1)
    assert not sampler._pending_interferers


def test_ordinary_request_names_no_interferer() -> None:
    sampler = busy_sampler()
    reasons_by_span(sampler, with_span_id("heavy", finished(10, trace=1)))
    assert reasons_by_span(sampler, delayed_by("heavy", with_span_id("normal", finished(10, trace=3)))) == {}
    assert set(reasons_by_span(sampler, oldest_live=2 * SECOND).values()) == {"none"}


def test_held_request_is_released_eventually() -> None:
    """After every request that could name it has ended, or after 30 s."""
    sampler = busy_sampler()
    assert (
        reasons_by_span(sampler, with_span_id("a", finished(10, SECOND, trace=1)), oldest_live=SECOND // 2)
        == {}
    )
    assert reasons_by_span(sampler, oldest_live=SECOND) == {}
    assert reasons_by_span(sampler, oldest_live=SECOND + 1) == {"a": "none"}
    reasons_by_span(sampler, with_span_id("b", finished(10, SECOND, trace=2)))
    late = with_span_id("c", finished(0, SECOND + tail_sampler.MAX_HOLD_NS + 1, trace=3))
    assert reasons_by_span(sampler, late) == {"c": "budget", "b": "none"}


def test_hold_expires_without_further_requests() -> None:
    sampler = busy_sampler()
    assert sampler.add(with_span_id("a", finished(10, SECOND, trace=1))) == []
    assert sampler.flush_held(SECOND + tail_sampler.MAX_HOLD_NS, 0) == []
    assert [
        decided.decision.reason for decided in sampler.flush_held(SECOND + tail_sampler.MAX_HOLD_NS + 1, 0)
    ] == ["none"]


def test_requests_with_one_span_id_are_both_decided() -> None:
    sampler = busy_sampler()
    assert sampler.add(with_span_id("a", finished(10, SECOND, trace=1))) == []
    assert len(sampler.add(with_span_id("a", finished(10, SECOND, trace=2)))) == 1
    assert len(sampler.flush_held(0, 1 << 62)) == 1


def test_number_of_held_requests_is_limited() -> None:
    sampler = busy_sampler()
    many = [
        with_span_id(str(i), finished(1, SECOND, trace=i)) for i in range(tail_sampler.MAX_HELD_REQUESTS + 3)
    ]
    assert list(reasons_by_span(sampler, *many)) == ["0", "1", "2"]


def test_baseline_request_per_size_is_kept_periodically() -> None:
    sampler = busy_sampler()
    sampler._baseline_at.clear()
    reasons = [
        sampler.make_decision(finished(5, SECOND + i * SECOND // 100, trace=i)).reason for i in range(50)
    ]
    assert reasons == ["baseline"] + ["none"] * 49
    assert (
        sampler.make_decision(finished(700, SECOND + tail_sampler.BASELINE_INTERVAL_NS, trace=99)).reason
        == "baseline"
    )


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, SECOND),
            st.integers(0, 400),
            st.sampled_from([events.OK, events.OK, events.ERROR]),
            st.integers(0, 40),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(0, 50),
)
def test_each_request_is_decided_once_with_exact_counts(
    history: list[tuple[int, int, int, int, bool]], budget: int
) -> None:
    sampler, at, final, wanted = auto_sampler(budget), SECOND, [], 0
    for number, (gap, steps, outcome, other, living) in enumerate(history):
        at += gap
        wanted += steps
        record = with_span_id(str(number), finished(steps, at, trace=number, outcome=outcome))
        final += sampler.add(delayed_by(str(other), record))
        final += sampler.flush_held(at, 0 if living else at)
    final += sampler.flush_held(at, 1 << 62)
    assert sorted(int(decided.record.span_id) for decided in final) == list(range(len(history)))
    assert sum(decided.decision.steps for decided in final) + sampler.dropped_steps.total() == wanted


def test_tpot_objective_uses_the_measured_decode_time() -> None:
    record = finished(10)
    record.first_token_at, record.output_tokens = 1, 41  # four tokens a step
    (record.summary,) = summarize_steps([record.steps], [False])
    lengths = measure_durations(record)
    assert lengths["tpot"] == round(record.decode_ns / 40)
    record.steps, record.first_token_at, record.last_token_at = None, 100, 500
    assert measure_durations(record)["tpot"] == 10
    record.first_token_at = 0  # the first token was not observed
    assert "tpot" not in measure_durations(record)


def ended_in_engine(failed_stage: str, outcome: int, error_type: str, **more: Any) -> RequestRecord:
    """A request that was in an engine when it ended after one second."""
    record = finished(outcome=outcome)
    record.generative, record.engine, record.steps = True, "toy", None
    record.failed_stage, record.error_type = failed_stage, error_type
    for name, value in more.items():
        setattr(record, name, value)
    return record


OBJECTIVES = slo.parse_objectives("ttft=500ms,itl=200ms,e2e=800ms")
UNSUCCESSFUL = {
    "client left in queue": ("queue", events.ABORTED, "client_disconnect", {}, ("ttft",)),
    "client left in prefill": ("prefill", events.ABORTED, "", {}, ("ttft",)),
    "timeout in prefill": ("prefill", events.ABORTED, "timeout", {}, ("ttft", "e2e")),
    "error in queue": ("queue", events.ERROR, "ValueError", {}, ("ttft", "e2e")),
    "not submitted": ("tokenize", events.ABORTED, "client_disconnect", {"engine": ""}, ()),
    "not generative": ("queue", events.ABORTED, "client_disconnect", {"generative": False}, ()),
    "telemetry lost": ("queue", events.ABORTED, "client_disconnect", {"telemetry_lost": True}, ()),
    "decode stalled": (
        "decode", events.ABORTED, "client_disconnect", {"first_token_at": 1, "last_token_at": SECOND // 2}, ("itl",),
    ),
    "decode cancelled": (
        "decode", events.ABORTED, "cancelled", {"first_token_at": 1, "last_token_at": SECOND - 1000}, (),
    ),
    "error in decode": ("decode", events.ERROR, "ValueError", {"first_token_at": 1, "last_token_at": SECOND - 1000}, ("e2e",)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("failed_stage", "outcome", "error", "more", "missed"), UNSUCCESSFUL.values(), ids=UNSUCCESSFUL
)
def test_waiting_for_tokens_counts_and_cancelling_does_not(
    failed_stage: str, outcome: int, error: str, more: dict[str, Any], missed: tuple[str, ...]
) -> None:
    """A request that ends while it waits for a token misses the objective; a cancelled request misses no e2e objective."""
    assert find_missed_objectives(ended_in_engine(failed_stage, outcome, error, **more), OBJECTIVES) == missed


def test_success_without_tokens_misses_no_token_objective() -> None:
    record = ended_in_engine("", events.OK, "")
    assert find_missed_objectives(record, slo.parse_objectives("ttft=1ms,itl=1ms")) == ()


def test_stalled_stream_misses_the_inter_token_objective() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(1, a, input_tokens=5)
    story.step(10, 20, [a], prompt={a: 5})
    story.step(20, 30, [a])
    story.aborts(900, a)
    assert find_missed_objectives(story.record(), slo.parse_objectives("ttft=100ms,itl=200ms,e2e=300ms")) == (
        "itl",
    )
    stalled = Story()
    b = stalled.arrives(0)
    stalled.submitted(1, b, input_tokens=5)
    stalled.aborts(900, b)
    assert find_missed_objectives(
        stalled.record(), slo.parse_objectives("ttft=100ms,itl=200ms,e2e=300ms")
    ) == ("ttft",)


def test_aborted_embedding_misses_no_token_objective() -> None:
    record = ended_in_engine("prefill", events.ABORTED, "timeout")
    record.operation = "embeddings"
    assert "ttft" not in find_missed_objectives(record, slo.parse_objectives("ttft=1ms,itl=1ms"))
