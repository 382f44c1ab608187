"""What looks at an engine's thread explain of the steps that took longer than such steps take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.thread_delays import CAPACITY, MAX_PENDING, ThreadDelays
from otel_infer.ringbuffer.events import ThreadSeen

MS = 1_000_000
COSTS = StepCostModel(8 * MS, 0.5 * MS, 0.1 * MS, 100)  # of four sequences: 10 ms


def table(*lengths: float, begin: float = 0.0, prompts: tuple[int, ...] = ()) -> np.ndarray:
    """Steps of four sequences one after the other (ms), the first of them before `begin`; which have a prompt."""
    ends = begin + np.cumsum([0.0, *lengths])
    count = len(ends)
    of_prompts = np.zeros(count)
    of_prompts[list(prompts)] = 100
    rows = [np.arange(count), ends - [5, *lengths], ends, np.ones(count), np.full(count, 4), of_prompts]
    return (np.array(rows) * np.array([[1], [MS], [MS], [1], [1], [1]])).astype(np.int64)


def seen(until: float, since: float, *, ran=0.0, waited=0.0, system=0.0, faults=0) -> ThreadSeen:
    ns = [round(value * MS) for value in (until, since, ran, waited, system)]
    return ThreadSeen(*ns, faults)


def explained(look: ThreadSeen, steps: np.ndarray) -> list[tuple[float, float, float]]:
    """ms of each step: (starved, faulted, blocked)."""
    strain = ThreadDelays()
    strain.add_sample(look)
    strain.resolve_samples(steps, COSTS, final=True)
    begins, ends = steps[2, :-1], steps[2, 1:]
    over = np.maximum(ends - begins - 10 * MS, 0)
    return [
        tuple(one) for one in np.round(np.array(strain.delay_shares(begins, ends)) * over / MS, 1).T.tolist()
    ]


def test_a_step_without_a_cpu_is_longer_by_what_it_waited() -> None:
    look = seen(50, 0, ran=30, waited=20)
    assert explained(look, table(10, 30, 10)) == [(0, 0, 0), (20, 0, 0), (0, 0, 0)]


def test_page_faults_cost_what_the_kernel_took_for_them() -> None:
    look = seen(40, 0, ran=40, system=20, faults=10_000)  # 2 µs each
    assert explained(look, table(20, 20)) == [(0, 10, 0), (0, 10, 0)]


def test_a_fault_that_seems_to_cost_more_than_any_does_was_something_else() -> None:
    look = seen(40, 0, ran=40, system=20, faults=1000)
    assert explained(look, table(20, 20)) == [(0, 2, 0), (0, 2, 0)]


def test_who_neither_ran_nor_wanted_to_was_blocked() -> None:
    look = seen(60, 0, ran=20)
    assert explained(look, table(10, 40, 10)) == [(0, 0, 0), (0, 0, 30), (0, 0, 0)]


def test_who_ran_longer_is_not_said_to_have_been_held_up() -> None:
    look = seen(60, 0, ran=60)
    assert explained(look, table(10, 40, 10)) == [(0, 0, 0)] * 3


def test_a_prompt_that_takes_its_time_on_the_device_is_no_lock() -> None:
    look = seen(60, 0, ran=5)
    assert explained(look, table(10, 40, 10, prompts=(2,))) == [(0, 0, 0)] * 3


def test_steps_that_took_what_they_take_leave_nothing_to_explain() -> None:
    look = seen(30, 0, ran=5, waited=25)
    assert explained(look, table(10, 10, 10)) == [(0, 0, 0)] * 3


def test_a_wait_is_told_when_it_is_over_and_began_before_that() -> None:
    strain, steps = ThreadDelays(), table(10, 10, 10, 60, 10)
    strain.add_sample(seen(50, 0, ran=32))
    strain.add_sample(seen(100, 50, ran=18, waited=50))  # 32 of them fit in here, 18 were before
    strain.resolve_samples(steps, COSTS, final=True)
    begins, ends = steps[2, :-1], steps[2, 1:]
    shares, over = strain.delay_shares(begins, ends), np.maximum(ends - begins - 10 * MS, 0) / MS
    assert (shares.starved * over).tolist() == pytest.approx([0, 0, 0, 50, 0], abs=2)
    assert (shares.blocked * over).max() < 0.5


def test_a_step_in_flight_keeps_nobody_from_knowing_of_those_that_are_done() -> None:
    strain, steps = ThreadDelays(), table(10, 30, 10, 10)
    steps[2, -1] = 0
    strain.add_sample(seen(40, 0, ran=20, waited=20))
    strain.add_sample(seen(50, 40, ran=10))
    strain.resolve_samples(steps, COSTS)
    assert strain.has_delays(10 * MS, 40 * MS)


def test_looks_that_no_step_ever_ends_in_are_forgotten() -> None:
    strain = ThreadDelays()
    for i in range(2 * MAX_PENDING):
        strain.add_sample(seen(10 * i + 10, 10 * i, ran=5))
    assert len(strain._pending) == MAX_PENDING


def test_a_stall_longer_than_several_looks_is_explained_by_all_of_them() -> None:
    strain, steps = ThreadDelays(), table(10, 160, 10)
    for since in range(0, 200, 50):
        strain.add_sample(seen(since + 50, since, ran=10, waited=40))
    assert strain.due == 50 * MS
    strain.resolve_samples(steps[:, :3], COSTS)
    assert strain.due == 1 << 63 and strain.has_pending  # of the last one more may become known
    strain.resolve_samples(steps, COSTS, final=True)
    assert not strain.has_pending
    begins, ends = steps[2, 1:2], steps[2, 2:3]
    assert strain.delay_shares(begins, ends).starved[0] * 150 == pytest.approx(37.5 + 40 + 40 + 18.75)
    assert strain.has_delays(int(begins[0]), int(ends[0]))
    assert not ThreadDelays().has_delays(0, 1 << 60)


def test_without_an_estimate_of_what_steps_cost_only_what_was_counted_is_known() -> None:
    strain = ThreadDelays()
    strain.add_sample(seen(50, 0, ran=30, waited=20, system=2, faults=1000))
    strain.resolve_samples(table(30, 30), None, final=True)
    assert not strain.has_delays(0, 50 * MS)
    starved, faulted = strain.delays_in_intervals(np.array([0, 25 * MS]), np.array([25 * MS, 50 * MS]))
    assert (starved / MS).tolist() == [10, 10] and (faulted / MS).tolist() == [1, 1]


def test_only_the_last_looks_are_remembered() -> None:
    strain = ThreadDelays()
    for i in range(2 * CAPACITY):
        strain.add_sample(seen(10 * i + 10, 10 * i, ran=5, waited=5))
        strain.resolve_samples(table(10, 10, begin=10 * i), None)
    strain.resolve_samples(table(10), None, final=True)
    last = 20 * CAPACITY * MS
    assert strain.delays_in_intervals(last - 100 * MS, last)[0] == pytest.approx(50 * MS)


@settings(max_examples=100)
@given(
    st.lists(st.floats(0.5, 80), min_size=2, max_size=12),
    st.lists(
        st.tuples(st.floats(1, 60), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9000)), max_size=10
    ),
)
def test_no_more_of_a_step_is_explained_than_it_took_longer(lengths: list[float], looks: list) -> None:
    strain, steps, at = ThreadDelays(), table(*lengths), 0.0
    for length, ran, waited, faults in looks:
        part = ran * length
        strain.add_sample(
            seen(at + length, at, ran=part, waited=(length - part) * waited, system=part, faults=faults)
        )
        at += length
    strain.resolve_samples(steps, COSTS, final=True)
    shares = np.array(strain.delay_shares(steps[2, :-1], steps[2, 1:]))
    assert (
        (shares >= -1e-9).all() and (shares[:2].sum(axis=0) <= 1 + 1e-9).all() and (shares <= 1 + 1e-9).all()
    )


@given(
    looks=st.lists(
        st.tuples(st.integers(1, 60), st.floats(0, 1), st.integers(0, 5000)), min_size=1, max_size=6
    ),
    begin=st.integers(-50, 400),
    length=st.integers(0, 400),
)
def test_of_one_interval_is_counted_what_is_counted_of_many(
    looks: list[tuple[int, float, int]], begin: int, length: int
) -> None:
    strain, at = ThreadDelays(), 0.0
    for lasted, waited, faults in looks:
        strain.add_sample(seen(at + lasted, at, waited=waited * lasted, system=faults / 1000, faults=faults))
        at += lasted
    strain.resolve_samples(table(*[10] * 4), None, final=True)
    one = strain.delay_in_interval(begin * MS, (begin + length) * MS)
    many = strain.delays_in_intervals(*(np.array([instant * MS]) for instant in (begin, begin + length)))
    assert one == pytest.approx(tuple(float(column[0]) for column in many), abs=1)
