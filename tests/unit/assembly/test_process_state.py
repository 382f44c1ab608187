"""The end of a server: orderly, on a signal, or by death."""

from __future__ import annotations

import pytest

from otel_infer.assembly.process_state import ProcessState
from otel_infer.ringbuffer import events

LEFT, CRASHED = events.ProcessLeft(1, ""), events.ProcessLeft(1, "ValueError")


def end_processes(state: ProcessState, *ends: tuple[int, events.ProcessLeft | None]) -> bool:
    """Ends processes in this order, each after its exit event if it recorded one."""
    for ring, event in ends:
        if event is not None:
            state.set_left(ring, event)
        state.remove_process(ring)
    return state.is_server_stopped()


@pytest.mark.parametrize(("event", "stopped"), [(LEFT, True), (CRASHED, False), (None, False)])
def test_only_an_orderly_exit_is_a_stop(event: events.ProcessLeft | None, stopped: bool) -> None:
    state = ProcessState()
    state.add_process(1, "server")
    assert not state.is_server_stopped()
    assert end_processes(state, (1, event)) is stopped


def test_the_last_process_decides() -> None:
    state = ProcessState()
    for ring in (1, 2, 3):
        state.add_process(ring, "server")
    assert not end_processes(state, (1, LEFT))
    assert not end_processes(state, (2, LEFT), (3, None))


def test_a_process_that_reads_its_own_events_stops_by_leaving() -> None:
    state = ProcessState()
    state.add_process(1, "server")
    state.set_left(1, LEFT)
    assert state.is_server_stopped()


def test_processes_that_the_server_started_do_not_decide() -> None:
    """A server kills its engine processes."""
    state = ProcessState()
    state.add_process(1, "server")
    state.add_process(2, "engine")
    assert end_processes(state, (1, LEFT), (2, None))


def test_death_after_a_signal_to_stop_is_a_stop() -> None:
    state = ProcessState()
    state.add_process(1, "server")
    state.stop_requested = True
    assert end_processes(state, (1, None))


def test_a_server_without_processes_yet_is_not_stopped() -> None:
    assert not ProcessState().is_server_stopped()
