"""What waits in BentoML's dispatcher: the items of requests, by the identity of their data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from otel_infer.instrumentation.batches import WaitingItem
from otel_infer.instrumentation.bentoml import DispatcherState


def make_item(is_ended: bool = False) -> WaitingItem:
    request: Any = SimpleNamespace(ended=is_ended)
    return WaitingItem(request, 1)


def test_data_that_several_requests_put_is_taken_in_order() -> None:
    state, data = DispatcherState(), [1.0]
    first, second = make_item(), make_item()
    state.put(data, first)
    state.put(data, second)
    assert [state.pop(data), state.pop(data), state.pop(data)] == [first, second, None]
    assert not state.items


def test_data_without_a_call_is_forgotten_alone() -> None:
    state, data = DispatcherState(), [1.0]
    first, second = make_item(), make_item()
    state.put(data, first)
    state.put(data, second)
    assert state.pop(data, second) is second
    assert state.pop(data, second) is None
    assert state.pop(data) is first


def test_items_of_ended_requests_are_dropped() -> None:
    state, data = DispatcherState(), [1.0]
    state.put(data, make_item(is_ended=True))
    item = make_item()
    state.put(data, item)
    assert list(state.items.values()) == [[item]]
    assert state.pop(data) is item and not state.items
