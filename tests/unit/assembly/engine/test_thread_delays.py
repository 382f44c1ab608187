"""Thread delays: samples of an engine's thread explain steps that took longer than expected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.thread_delays import CAPACITY, MAX_PENDING, ThreadDelays
from otel_infer.ringbuffer.events import ThreadRan, ThreadSeen

MS = 1_000_000
NONE = (0, 0, 0, 0)
COSTS = StepCostModel(8 * MS, 0.5 * MS, 0.1 * MS, 100)  # of four sequences: 10 ms


def table(*lengths: float, begin: float = 0.0, prompts: tuple[int, ...] = ()) -> np.ndarray:
    """Steps of four sequences in a row (ms), the first before `begin`. `prompts` are the indexes of steps with a prompt."""
    ends = begin + np.cumsum([0.0, *lengths])
    count = len(ends)
    prompt_tokens = np.zeros(count)
    prompt_tokens[list(prompts)] = 100
    rows = [np.arange(count), ends - [5, *lengths], ends, np.ones(count), np.full(count, 4), prompt_tokens]
    return (np.array(rows) * np.array([[1], [MS], [MS], [1], [1], [1]])).astype(np.int64)


def sample(until: float, since: float, *, ran=0.0, waited=0.0, system=0.0, faults=0) -> ThreadSeen:
    ns = [round(value * MS) for value in (until, since, ran, waited, system)]
    return ThreadSeen(*ns, faults)


def delays_by_step(seen: ThreadSeen, steps: np.ndarray) -> list[tuple[float, float, float, float]]:
    """Returns the ms of each step: (starved, faulted, blocked, ran longer)."""
    delays = ThreadDelays()
    delays.add_sample(seen)
    delays.resolve_samples(steps, COSTS, final=True)
    begins, ends = steps[2, :-1], steps[2, 1:]
    over = np.maximum(ends - begins - 10 * MS, 0)
    return [
        tuple(row) for row in np.round(np.array(delays.delay_shares(begins, ends)) * over / MS, 1).T.tolist()
    ]


def test_waiting_for_a_cpu_is_starved() -> None:
    seen = sample(50, 0, ran=30, waited=20)
    assert delays_by_step(seen, table(10, 30, 10)) == [NONE, (20, 0, 0, 0), NONE]


def test_page_faults_cost_their_kernel_time() -> None:
    seen = sample(40, 0, ran=40, system=20, faults=10_000)  # 2 µs each
    assert delays_by_step(seen, table(20, 20)) == [(0, 10, 0, 0)] * 2


def test_page_fault_cost_is_capped() -> None:
    seen = sample(40, 0, ran=40, system=20, faults=1000)
    assert delays_by_step(seen, table(20, 20)) == [(0, 2, 0, 10)] * 2  # the rest is the thread's own


def test_thread_neither_running_nor_runnable_is_blocked() -> None:
    seen = sample(60, 0, ran=20)
    assert delays_by_step(seen, table(10, 40, 10)) == [NONE, (0, 0, 30, 0), NONE]


def test_time_on_a_cpu_beyond_the_usual_is_ran_longer() -> None:
    seen = sample(60, 0, ran=60)
    assert delays_by_step(seen, table(10, 40, 10)) == [NONE, (0, 0, 0, 30), NONE]


def test_a_stall_is_divided_into_blocked_and_ran_longer() -> None:
    seen = sample(60, 0, ran=42)  # 30 of them are usual
    assert delays_by_step(seen, table(10, 40, 10)) == [NONE, (0, 0, 18, 12), NONE]


def test_long_prompt_on_the_device_is_not_blocked() -> None:
    seen = sample(60, 0, ran=5)
    assert delays_by_step(seen, table(10, 40, 10, prompts=(2,))) == [NONE] * 3


def test_steps_of_normal_length_have_no_delay() -> None:
    seen = sample(30, 0, ran=5, waited=25)
    assert delays_by_step(seen, table(10, 10, 10)) == [NONE] * 3


def test_wait_reported_at_its_end_covers_earlier_samples() -> None:
    delays, steps = ThreadDelays(), table(10, 10, 10, 60, 10)
    delays.add_sample(sample(50, 0, ran=32))
    delays.add_sample(sample(100, 50, ran=18, waited=50))  # 32 ms fit into this sample, 18 ms were before it
    delays.resolve_samples(steps, COSTS, final=True)
    begins, ends = steps[2, :-1], steps[2, 1:]
    shares, over = delays.delay_shares(begins, ends), np.maximum(ends - begins - 10 * MS, 0) / MS
    assert (shares.starved * over).tolist() == pytest.approx([0, 0, 0, 50, 0], abs=2)
    assert (shares.blocked * over).max() < 0.5


def test_step_in_flight_does_not_block_resolution() -> None:
    delays, steps = ThreadDelays(), table(10, 30, 10, 10)
    steps[2, -1] = 0
    delays.add_sample(sample(40, 0, ran=20, waited=20))
    delays.add_sample(sample(50, 40, ran=10))
    delays.resolve_samples(steps, COSTS)
    assert delays.has_delays(10 * MS, 40 * MS)


def test_a_concluded_request_takes_the_last_sample_that_began_before_its_end() -> None:
    delays, steps = ThreadDelays(), table(10, 30, 10, 10)
    delays.add_sample(sample(40, 0, ran=20, waited=20))
    for ended_at in (0, -1):  # without a request, and for one that ended before
        delays.resolve_samples(steps, COSTS, ended_at=ended_at)
        assert not delays.has_delays(10 * MS, 40 * MS)
    delays.resolve_samples(steps, COSTS, ended_at=45 * MS)
    assert delays.has_delays(10 * MS, 40 * MS)


def test_samples_without_a_step_end_are_dropped() -> None:
    delays = ThreadDelays()
    for i in range(2 * MAX_PENDING):
        delays.add_sample(sample(10 * i + 10, 10 * i, ran=5))
    assert len(delays._pending) == MAX_PENDING


def test_long_stall_is_explained_by_several_samples() -> None:
    delays, steps = ThreadDelays(), table(10, 160, 10)
    for since in range(0, 200, 50):
        delays.add_sample(sample(since + 50, since, ran=10, waited=40))
    assert delays.due == 50 * MS
    delays.resolve_samples(steps[:, :3], COSTS)
    assert delays.due == 1 << 63 and delays.has_pending  # more of the last sample may become known
    delays.resolve_samples(steps, COSTS, final=True)
    assert not delays.has_pending
    begins, ends = steps[2, 1:2], steps[2, 2:3]
    assert delays.delay_shares(begins, ends).starved[0] * 150 == pytest.approx(37.5 + 40 + 40 + 18.75)
    assert delays.has_delays(int(begins[0]), int(ends[0]))
    assert not ThreadDelays().has_delays(0, 1 << 60)


def test_samples_from_before_the_cost_model_are_shared_once_it_is_known() -> None:
    delays, steps = ThreadDelays(), table(10, 30, 30, 10)
    delays.add_sample(sample(70, 10, ran=20, waited=40))
    delays.resolve_samples(steps, None, final=True)
    frozen = delays.freeze()
    assert frozen is not None and delays.concerns(0, has_model=True)
    delays.resolve_samples(steps, COSTS, final=True)
    shares = delays.delay_shares(np.array([40 * MS]), np.array([70 * MS]))
    assert shares.starved[0] == pytest.approx(1.0) and not delays.concerns(0, has_model=True)
    assert not frozen.has_delays(0, 70 * MS)  # what was concluded before does not change
    assert delays.delay_in_interval(10 * MS, 70 * MS)[0] == 40 * MS


def test_without_a_cost_model_only_counted_delays_exist() -> None:
    delays = ThreadDelays()
    delays.add_sample(sample(50, 0, ran=30, waited=20, system=2, faults=1000))
    delays.resolve_samples(table(30, 30), None, final=True)
    assert not delays.has_delays(0, 50 * MS)
    starved, faulted = delays.delays_in_intervals(np.array([0, 25 * MS]), np.array([25 * MS, 50 * MS]))
    assert (starved / MS).tolist() == [10, 10] and (faulted / MS).tolist() == [1, 1]


def test_only_the_latest_samples_are_kept() -> None:
    delays = ThreadDelays()
    for i in range(2 * CAPACITY):
        delays.add_sample(sample(10 * i + 10, 10 * i, ran=5, waited=5))
        delays.resolve_samples(table(10, 10, begin=10 * i), None)
    delays.resolve_samples(table(10), None, final=True)
    last = 20 * CAPACITY * MS
    assert delays.delays_in_intervals(last - 100 * MS, last)[0] == pytest.approx(50 * MS)


@settings(max_examples=100)
@given(
    st.lists(st.floats(0.5, 80), min_size=2, max_size=12),
    st.lists(
        st.tuples(st.floats(1, 60), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9000)), max_size=10
    ),
)
def test_explained_time_does_not_exceed_the_excess(lengths: list[float], samples: list) -> None:
    delays, steps, at = ThreadDelays(), table(*lengths), 0.0
    for length, ran, waited, faults in samples:
        part = ran * length
        delays.add_sample(
            sample(at + length, at, ran=part, waited=(length - part) * waited, system=part, faults=faults)
        )
        at += length
    delays.resolve_samples(steps, COSTS, final=True)
    shares = np.array(delays.delay_shares(steps[2, :-1], steps[2, 1:]))
    assert (
        (shares >= -1e-9).all() and (shares[:2].sum(axis=0) <= 1 + 1e-9).all() and (shares <= 1 + 1e-9).all()
    )


@given(
    samples=st.lists(
        st.tuples(st.integers(1, 60), st.floats(0, 1), st.integers(0, 5000)), min_size=1, max_size=6
    ),
    begin=st.integers(-50, 400),
    length=st.integers(0, 400),
)
def test_single_interval_matches_the_vectorized_result(
    samples: list[tuple[int, float, int]], begin: int, length: int
) -> None:
    delays, at = ThreadDelays(), 0.0
    for lasted, waited, faults in samples:
        delays.add_sample(
            sample(at + lasted, at, waited=waited * lasted, system=faults / 1000, faults=faults)
        )
        at += lasted
    delays.resolve_samples(table(*[10] * 4), None, final=True)
    single = delays.delay_in_interval(begin * MS, (begin + length) * MS)
    many = delays.delays_in_intervals(*(np.array([instant * MS]) for instant in (begin, begin + length)))
    assert single == pytest.approx(tuple(float(column[0]) for column in many), abs=1)


def total(until: float, since: float, *, ran=0.0, waited=0.0, system=0.0, faults=0) -> ThreadRan:
    us = [round(value * 1000) for value in (ran, waited, system)]
    return ThreadRan(round(until * MS), round(since * MS), "toy", 0, *us, faults)


def explain_steps(delays: ThreadDelays, steps: np.ndarray) -> list[float]:
    """Returns the starved ms of each step."""
    delays.resolve_samples(steps, COSTS, final=True)
    begins, ends = steps[2, :-1], steps[2, 1:]
    over = np.maximum(ends - begins - 10 * MS, 0)
    return (np.array(delays.delay_shares(begins, ends)[0]) * over / MS).round(1).tolist()


def test_totals_of_a_thread_without_samples_are_one_sample() -> None:
    delays = ThreadDelays()
    delays.add_totals(total(60, 0, ran=40, waited=20))
    assert explain_steps(delays, table(10, 30, 10, 10)) == [0, 20, 0, 0]


def test_totals_complete_the_samples_of_a_thread() -> None:
    """The sidecar has seen 10 ms of waiting up to 40 ms; the other 15 ms were after that."""
    delays = ThreadDelays()
    delays.add_sample(sample(40, 0, ran=30, waited=10))
    delays.add_totals(total(80, 0, ran=50, waited=25))
    assert explain_steps(delays, table(10, 20, 10, 10, 25, 5)) == [0, 10, 0, 0, 15, 0]


def test_totals_of_a_later_thread_ignore_the_earlier_one() -> None:
    delays = ThreadDelays()
    delays.add_sample(sample(40, 0, ran=30, waited=10))
    delays.add_totals(total(40, 0, ran=30, waited=10))
    delays.add_totals(total(100, 60, ran=20, waited=20))
    assert explain_steps(delays, table(10, 20, 10, 20, 30, 10)) == [0, 10, 0, 0, 20, 0]


def test_totals_older_than_the_samples_add_nothing() -> None:
    delays = ThreadDelays()
    delays.add_sample(sample(40, 0, ran=40))
    delays.add_totals(total(30, 0, ran=10, waited=20))
    assert explain_steps(delays, table(10, 20, 10)) == [0, 0, 0]


def test_a_sample_that_began_before_the_generation_counts_its_part() -> None:
    """The thread was idle for 40 ms, then computed 10 ms, and 20 ms after the sample, and waited 15 ms."""
    delays = ThreadDelays()
    delays.add_sample(sample(50, 0, ran=10))
    delays.add_totals(total(85, 40, ran=30, waited=15))
    assert explain_steps(delays, table(40, 10, 25, 10)) == [0, 0, 15, 0]


def test_a_sample_after_the_totals_begins_where_they_end() -> None:
    delays = ThreadDelays()
    delays.add_sample(sample(20, 0, ran=20))
    delays.add_totals(total(40, 0, ran=30, waited=10))
    delays.add_sample(sample(60, 20, ran=30, waited=10))
    assert explain_steps(delays, table(10, 10, 20, 10, 10)) == [0, 0, 10, 0, 0]
