"""What is kept: a budget of step spans that holds, and a part of it for those that failed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
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
    """A request with so many decode steps, and a prompt in so many chunks."""
    rows = np.arange(1, steps + 2)
    said: dict[str, Any] = {
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
    return RequestRecord(**{**ids, **dict.fromkeys(names, ""), "arrived_at": 0, "wall_offset": 0, **said})


def spent(decision: Decision, record: RequestRecord) -> int:
    return decision.steps + len(record.prefill_steps) * decision.prefill_steps


def auto(budget: int = 2000, keep_unsampled: bool = False, ratio: bool = False) -> TailSampler:
    return TailSampler("auto", budget, keep_unsampled, ratio)


# ── whether it is exported ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["all", "auto", "off"])
@pytest.mark.parametrize("outcome", [events.OK, events.ERROR])
def test_a_request_that_is_not_sampled_is_not_exported_and_costs_nothing(mode: str, outcome: int) -> None:
    keeps = TailSampler(mode, 10, keep_unsampled=False, ratio=False)
    for _ in range(100):
        decision = keeps.make_decision(finished(50, sampled=False, outcome=outcome))
        assert decision == Decision(False, 0, "unsampled")
    assert keeps.dropped_steps.total() == 0
    assert keeps.make_decision(finished(50)).steps == (0 if mode == "off" else 50)


@pytest.mark.parametrize(("sampled", "reason"), [(True, "none"), (False, "unsampled")])
def test_what_another_span_tells_already_is_not_exported(sampled: bool, reason: str) -> None:
    record = finished(sampled=sampled)
    record.redundant = True
    keeps = auto()
    assert (keeps.is_exported(record), keeps.make_decision(record)) == (False, Decision(False, 0, reason))


@pytest.mark.parametrize("sampled", [True, False])
def test_an_objective_is_missed_whether_or_not_the_request_is_sampled(sampled: bool) -> None:
    keeps = TailSampler("off", 0, False, False, slo.parse_objectives("e2e=1us"))
    decision = keeps.make_decision(finished(50, sampled=sampled))
    assert (decision.export, decision.missed) == (sampled, ("e2e",))


def test_a_request_that_is_not_sampled_is_kept_if_that_was_asked_for() -> None:
    assert auto(keep_unsampled=True).make_decision(finished(5, sampled=False)) == Decision(True, 5, "budget")


# ── which steps ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcome", "ratio", "reason"),
    [
        (events.OK, False, "budget"),
        (events.OK, True, "sampled"),
        (events.ERROR, False, "error"),
        (events.ABORTED, True, "aborted"),
    ],
)
def test_at_low_load_every_step_is_kept_and_the_reason_says_why(
    outcome: int, ratio: bool, reason: str
) -> None:
    assert auto(ratio=ratio).make_decision(finished(300, outcome=outcome)) == Decision(True, 300, reason)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(events.OK, "all"), (events.ERROR, "error"), (events.ABORTED, "aborted")]
)
def test_all_is_all_without_a_budget(outcome: int, reason: str) -> None:
    keeps = TailSampler("all", 1, keep_unsampled=False, ratio=False)
    for _ in range(3):
        assert keeps.make_decision(finished(50_000, outcome=outcome, chunks=3)) == Decision(
            True, 50_000, reason, True
        )
    assert keeps.dropped_steps.total() == 0


def test_of_all_only_a_share_is_made_where_that_is_too_much_but_what_failed_keeps_its_steps() -> None:
    keeps = TailSampler("all", 1, keep_unsampled=False, ratio=False)
    keeps.share = 0.25
    traces = [number << 120 | 1 for number in range(256)]
    final = [kept for trace in traces for kept in keeps.add(finished(10, trace=trace))]
    assert [kept.decision.reason for kept in final] == ["all"] * 64 + ["none"] * 192
    assert keeps.dropped_steps == {"none": 1920}
    assert keeps.make_decision(finished(10, trace=traces[-1], outcome=events.ERROR)) == Decision(
        True, 10, "error"
    )


def test_a_share_of_the_budget_is_a_smaller_budget() -> None:
    keeps = auto(budget=100)
    keeps.share = 0.5
    assert keeps.make_decision(finished(1000, SECOND, trace=1)).steps > 0
    kept = sum(keeps.make_decision(finished(100, SECOND * (2 + n), trace=10 + n)).steps for n in range(100))
    assert kept <= 50 * 110


@pytest.mark.parametrize("outcome", [events.OK, events.ERROR])
def test_off_is_no_step_and_the_request_all_the_same(outcome: int) -> None:
    keeps = TailSampler("off", 2000, keep_unsampled=False, ratio=False)
    assert keeps.make_decision(finished(50, outcome=outcome, chunks=3)) == Decision(True, 0, "none")


def test_the_first_step_of_a_request_is_its_prefill_and_costs_nothing() -> None:
    assert auto(budget=0).make_decision(finished(0)) == Decision(True, 0, "budget")


def test_chunks_of_a_prompt_are_step_spans_too() -> None:
    keeps = auto()
    assert keeps.make_decision(finished(10, chunks=5, trace=1)) == Decision(True, 10, "budget", True)
    assert keeps.make_decision(finished(990, chunks=1, trace=1)).steps == 985


def test_chunks_are_kept_whole_or_not_at_all() -> None:
    keeps = auto(budget=0)
    keeps._budget_left = 7.0
    ((_, decision),) = keeps.add(finished(4, chunks=8))
    assert (decision.steps, decision.prefill_steps) == (4, False)
    assert keeps.dropped_steps.total() == 8


def test_decode_steps_that_have_no_decode_to_hang_from_cost_nothing() -> None:
    record = finished(10)
    record.stages = []
    assert auto().make_decision(record) == Decision(True, 0, "budget")


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
def test_no_second_has_more_steps_than_the_budget_and_what_was_saved_up(
    history: list[tuple[int, int, int, int, int]], budget: int
) -> None:
    keeps, at, kept = auto(budget), SECOND, []
    for gap, steps, outcome, trace, chunks in history:
        at += gap
        record = finished(steps, at, trace=trace, outcome=outcome, chunks=chunks)
        kept.append((at, spent(keeps.make_decision(record), record)))
    for begin, end in itertools.combinations_with_replacement(range(len(kept)), 2):
        seconds = (kept[end][0] - kept[begin][0]) / SECOND
        steps = sum(count for _, count in kept[begin : end + 1])
        assert steps <= budget * BURST_SECONDS + budget * seconds + 1e-6


@settings(max_examples=100)
@given(histories, st.integers(0, 300))
def test_what_is_kept_and_what_is_left_out_are_all_there_was(
    history: list[tuple[int, int, int, int, int]], budget: int
) -> None:
    keeps, at, wanted, final = auto(budget), SECOND, 0, []
    counts = [0]
    for gap, steps, outcome, trace, chunks in history:
        at += gap
        wanted += steps + (chunks if chunks > 1 else 0)
        final += keeps.add(finished(steps, at, trace=trace, outcome=outcome, chunks=chunks))
        counts.append(keeps.dropped_steps.total())
    final += keeps.flush_held(at, 1 << 62)
    for record, decision in final:
        assert decision.export
        assert 0 <= decision.steps <= tail_sampler._count_decode_steps(record)
        assert decision.reason in semconv.KEEP_REASONS
    assert keeps.dropped_steps.total() == wanted - sum(spent(decision, record) for record, decision in final)
    assert counts == sorted(counts)  # whoever reads a counter takes one that falls for another


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, 900)), max_size=60), st.integers(4, 300))
def test_however_much_went_well_there_is_room_for_what_fails(
    history: list[tuple[int, int]], budget: int
) -> None:
    keeps, at = auto(budget), SECOND
    for number, (gap, steps) in enumerate(history):
        at += gap
        keeps.make_decision(finished(steps, at, trace=number))
    reserved = min(int(budget * BURST_SECONDS * RESERVED_SHARE), MAX_STEPS_PER_TRACE)
    assert keeps.make_decision(finished(reserved, at, trace=9999, outcome=events.ERROR)) == Decision(
        True, reserved, "error"
    )


def test_ordinary_requests_leave_the_reserve_alone_and_say_that_they_have_no_steps() -> None:
    keeps = auto(budget=40)
    kept = [keeps.make_decision(finished(100, trace=number)) for number in range(10)]
    assert [(decision.reason, decision.steps) for decision in kept[:4]] == [
        ("budget", 100),
        ("budget", 100),
        ("baseline", 100),
        ("none", 0),
    ]
    assert kept[-1] == Decision(True, 0, "none")
    assert keeps.make_decision(finished(100, trace=99, outcome=events.ABORTED)) == Decision(
        True, 100, "aborted"
    )
    assert keeps.make_decision(finished(100, trace=98, outcome=events.ERROR)) == Decision(True, 0, "error")


def test_the_budget_comes_back_with_time() -> None:
    keeps = auto(budget=100)
    assert sum(keeps.make_decision(finished(900, trace=number)).steps for number in range(3)) == 750
    assert keeps.make_decision(finished(900, SECOND, trace=7)).steps == 0
    assert keeps.make_decision(finished(900, 3 * SECOND, trace=8)).steps == 75
    assert keeps.make_decision(finished(900, 1000 * SECOND, trace=9)).steps == 750


def test_an_end_that_is_told_late_gives_nothing_back() -> None:
    keeps = auto(budget=100)
    for number in range(3):
        keeps.make_decision(finished(900, 100 * SECOND, trace=number))
    assert keeps.make_decision(finished(900, 50 * SECOND, trace=7)).steps == 0
    assert keeps.make_decision(finished(900, 100 * SECOND, trace=8)).steps == 0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1500), st.integers(1, 9)), max_size=40))
def test_a_trace_has_at_most_a_thousand_step_spans_over_all_its_requests(
    history: list[tuple[int, int, int]],
) -> None:
    keeps = auto(budget=1_000_000)
    per_trace: dict[int, int] = {}
    for trace, steps, chunks in history:
        record = finished(steps, trace=trace, chunks=chunks)
        per_trace[trace] = per_trace.get(trace, 0) + spent(keeps.make_decision(record), record)
    assert all(count <= MAX_STEPS_PER_TRACE for count in per_trace.values())


def test_traces_are_remembered_by_their_last_use_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_sampler, "MAX_TRACES", 3)
    keeps = auto(budget=1_000_000)
    for trace in (1, 2, 3, 1, 4):
        keeps.make_decision(finished(1000, trace=trace))
    assert keeps.make_decision(finished(10, trace=1)).steps == 0
    assert keeps.make_decision(finished(10, trace=2)).steps == 10


# ── what explains ────────────────────────────────────────────────────────────────────────────────────────────────


def named(span: str, record: RequestRecord) -> RequestRecord:
    record.span_id = span.encode().ljust(8)
    return record


def held_up_by(span: str, record: RequestRecord) -> RequestRecord:
    record.breakdown = LatencyBreakdown({"interference": 1}, Interferer(b"t" * 16, span.encode().ljust(8), 1))
    return record


def taken(keeps: TailSampler, *records: RequestRecord, oldest_live: int = 0) -> dict[str, str]:
    """Reasons of those that are decided now, by span; now is the last of these ends."""
    final = [kept for record in records for kept in keeps.add(record)]
    final += keeps.flush_held(max((record.ended_at for record in records), default=0), oldest_live)
    return {kept.record.span_id.decode().strip(): kept.decision.reason for kept in final}


def busy(budget: int = 100, **more: Any) -> TailSampler:
    """No room for ordinary requests, and no baseline due for those of no size."""
    keeps = TailSampler("auto", budget, False, False, **more)
    keeps._budget_left = budget * BURST_SECONDS * RESERVED_SHARE
    keeps._refilled_at = SECOND
    keeps._baseline_at[0, 0] = SECOND
    return keeps


def test_an_objective_that_was_missed_is_a_reason_and_is_named() -> None:
    keeps = TailSampler("auto", 2000, False, False, slo.parse_objectives("e2e=100ms,queue=1ms"))
    record = finished(5, at=SECOND)
    record.stages.append(Stage("queue", 0, 2_000_000, {}))
    assert keeps.make_decision(record) == Decision(True, 5, "slo", missed=("e2e", "queue"), slow=True)
    assert keeps.make_decision(finished(5, at=1000)) == Decision(True, 5, "budget")


def test_a_preempted_request_and_a_slow_one_are_kept_where_there_is_no_room_for_ordinary_ones() -> None:
    keeps = busy(slow_share=0.05)
    for number in range(100):
        assert keeps.make_decision(finished(10, SECOND, trace=number)).reason == "none"
    preempted = finished(10, SECOND, trace=200)
    preempted.preemptions = 1
    assert keeps.make_decision(preempted) == Decision(True, 10, "preempted")
    assert keeps.make_decision(finished(10, 3 * SECOND, trace=201)) == Decision(True, 10, "slow", slow=True)


def test_one_that_held_up_another_is_kept_when_it_is_named_though_it_was_over_before() -> None:
    keeps = busy()
    assert taken(keeps, named("culprit", finished(10, trace=1)), named("other", finished(10, trace=2))) == {}
    victim = held_up_by("culprit", named("victim", finished(10, SECOND + 1, trace=3, outcome=events.ERROR)))
    assert taken(keeps, victim) == {"victim": "error", "culprit": "interferer"}
    assert taken(keeps, oldest_live=2 * SECOND) == {"other": "none"}
    assert keeps.dropped_steps == {"none": 10}


def test_one_that_is_named_before_it_ends_is_kept_when_it_ends() -> None:
    keeps = busy()
    victim = held_up_by("culprit", named("victim", finished(10, trace=3, outcome=events.ERROR)))
    assert taken(keeps, victim) == {"victim": "error"}
    assert taken(keeps, named("culprit", finished(10, SECOND, trace=4))) == {"culprit": "interferer"}


def test_a_name_is_waited_for_only_as_long_as_somebody_is_in_flight_who_was_there_then() -> None:
    keeps = busy()
    victim = held_up_by("culprit", named("victim", finished(10, SECOND, trace=3, outcome=events.ERROR)))
    assert taken(keeps, victim, oldest_live=victim.ended_at) == {"victim": "error"}
    assert list(keeps._pending_interferers) == [b"culprit "]
    keeps.flush_held(2 * SECOND, oldest_live=victim.ended_at + 1)
    assert not keeps._pending_interferers


def test_an_ordinary_request_names_nobody() -> None:
    keeps = busy()
    taken(keeps, named("culprit", finished(10, trace=1)))
    assert taken(keeps, held_up_by("culprit", named("fine", finished(10, trace=3)))) == {}
    assert set(taken(keeps, oldest_live=2 * SECOND).values()) == {"none"}


def test_nobody_waits_once_all_who_could_name_it_are_gone_or_for_more_than_half_a_minute() -> None:
    keeps = busy()
    assert taken(keeps, named("a", finished(10, SECOND, trace=1)), oldest_live=SECOND // 2) == {}
    assert taken(keeps, oldest_live=SECOND) == {}
    assert taken(keeps, oldest_live=SECOND + 1) == {"a": "none"}
    taken(keeps, named("b", finished(10, SECOND, trace=2)))
    late = named("c", finished(0, SECOND + tail_sampler.MAX_HOLD_NS + 1, trace=3))
    assert taken(keeps, late) == {"c": "budget", "b": "none"}


def test_half_a_minute_is_over_though_nothing_else_ends() -> None:
    keeps = busy()
    assert keeps.add(named("a", finished(10, SECOND, trace=1))) == []
    assert keeps.flush_held(SECOND + tail_sampler.MAX_HOLD_NS, 0) == []
    assert [kept.decision.reason for kept in keeps.flush_held(SECOND + tail_sampler.MAX_HOLD_NS + 1, 0)] == [
        "none"
    ]


def test_two_of_the_same_span_are_both_decided() -> None:
    keeps = busy()
    assert keeps.add(named("a", finished(10, SECOND, trace=1))) == []
    assert len(keeps.add(named("a", finished(10, SECOND, trace=2)))) == 1
    assert len(keeps.flush_held(0, 1 << 62)) == 1


def test_no_more_than_so_many_wait() -> None:
    keeps = busy()
    many = [named(str(i), finished(1, SECOND, trace=i)) for i in range(tail_sampler.MAX_HELD_REQUESTS + 3)]
    assert list(taken(keeps, *many)) == ["0", "1", "2"]


def test_an_ordinary_request_of_each_size_is_kept_now_and_then_to_compare_with() -> None:
    keeps = busy()
    keeps._baseline_at.clear()
    reasons = [
        keeps.make_decision(finished(5, SECOND + i * SECOND // 100, trace=i)).reason for i in range(50)
    ]
    assert reasons == ["baseline"] + ["none"] * 49
    assert (
        keeps.make_decision(finished(700, SECOND + tail_sampler.BASELINE_INTERVAL_NS, trace=99)).reason
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
def test_every_request_is_decided_once_and_what_was_left_out_is_what_is_missing(
    history: list[tuple[int, int, int, int, bool]], budget: int
) -> None:
    keeps, at, final, wanted = auto(budget), SECOND, [], 0
    for number, (gap, steps, outcome, other, living) in enumerate(history):
        at += gap
        wanted += steps
        record = named(str(number), finished(steps, at, trace=number, outcome=outcome))
        final += keeps.add(held_up_by(str(other), record))
        final += keeps.flush_held(at, 0 if living else at)
    final += keeps.flush_held(at, 1 << 62)
    assert sorted(int(kept.record.span_id) for kept in final) == list(range(len(history)))
    assert sum(kept.decision.steps for kept in final) + keeps.dropped_steps.total() == wanted


def test_time_per_token_is_promised_as_it_is_measured() -> None:
    record = finished(10)
    record.first_token_at, record.output_tokens = 1, 41  # four tokens a step
    (record.summary,) = summarize_steps([record.steps], [False])
    lengths = tail_sampler._measure_durations(record)
    assert lengths["tpot"] == round(record.decode_ns / 40)
    record.steps, record.first_token_at, record.last_token_at = None, 100, 500
    assert tail_sampler._measure_durations(record)["tpot"] == 10
    record.first_token_at = 0  # nobody saw the first one
    assert "tpot" not in tail_sampler._measure_durations(record)


def waiting(failed_stage: str, outcome: int, error_type: str, **more: Any) -> RequestRecord:
    """A request that an engine had when it ended after a second."""
    record = finished(outcome=outcome)
    record.generative, record.engine, record.steps = True, "toy", None
    record.failed_stage, record.error_type = failed_stage, error_type
    for name, value in more.items():
        setattr(record, name, value)
    return record


PROMISES = slo.parse_objectives("ttft=500ms,itl=200ms,e2e=800ms")
GIVEN_UP = {
    "its client, in the queue": ("queue", events.ABORTED, "client_disconnect", {}, ("ttft",)),
    "its client, in the prompt": ("prefill", events.ABORTED, "", {}, ("ttft",)),
    "a time-out": ("prefill", events.ABORTED, "timeout", {}, ("ttft", "e2e")),
    "an error": ("queue", events.ERROR, "ValueError", {}, ("ttft", "e2e")),
    "no engine yet": ("tokenize", events.ABORTED, "client_disconnect", {"engine": ""}, ()),
    "no tokens to be had": ("queue", events.ABORTED, "client_disconnect", {"generative": False}, ()),
    "facts are missing": ("queue", events.ABORTED, "client_disconnect", {"telemetry_lost": True}, ()),
    "stuck": (
        "decode", events.ABORTED, "client_disconnect", {"first_token_at": 1, "last_token_at": SECOND // 2}, ("itl",),
    ),
    "stopped": (
        "decode", events.ABORTED, "cancelled", {"first_token_at": 1, "last_token_at": SECOND - 1000}, (),
    ),
    "broken": ("decode", events.ERROR, "ValueError", {"first_token_at": 1, "last_token_at": SECOND - 1000}, ("e2e",)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("failed_stage", "outcome", "error", "more", "missed"), GIVEN_UP.values(), ids=GIVEN_UP
)
def test_who_ends_waiting_for_a_token_has_waited_so_long_and_who_is_stopped_has_no_end_to_miss(
    failed_stage: str, outcome: int, error: str, more: dict[str, Any], missed: tuple[str, ...]
) -> None:
    assert (
        tail_sampler.find_missed_objectives(waiting(failed_stage, outcome, error, **more), PROMISES) == missed
    )


def test_a_success_without_a_token_was_no_wait_for_one() -> None:
    record = waiting("", events.OK, "")
    assert tail_sampler.find_missed_objectives(record, slo.parse_objectives("ttft=1ms,itl=1ms")) == ()


def test_a_generation_that_hangs_in_mid_stream_has_missed_what_is_promised_between_tokens() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(1, a, input_tokens=5)
    story.step(10, 20, [a], prompt={a: 5})
    story.step(20, 30, [a])
    story.aborts(900, a)
    assert tail_sampler.find_missed_objectives(
        story.record(), slo.parse_objectives("ttft=100ms,itl=200ms,e2e=300ms")
    ) == ("itl",)
    hung = Story()
    b = hung.arrives(0)
    hung.submitted(1, b, input_tokens=5)
    hung.aborts(900, b)
    assert tail_sampler.find_missed_objectives(
        hung.record(), slo.parse_objectives("ttft=100ms,itl=200ms,e2e=300ms")
    ) == ("ttft",)


def test_who_gives_up_on_an_embedding_waited_for_no_token() -> None:
    record = waiting("prefill", events.ABORTED, "timeout")
    record.operation = "embeddings"
    assert "ttft" not in tail_sampler.find_missed_objectives(record, slo.parse_objectives("ttft=1ms,itl=1ms"))
