"""A stall is divided among its causes, and never counts twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.analysis.attribution.decode import _move_stalls, _move_to_batching, _ThreadDelayColumns
from otel_infer.assembly.engine.step_cost import StepCostModel


@pytest.mark.parametrize(("blocked", "longer"), [(0.7, 0.6), (1.0, 1.0), (0.0, 1.0), (0.3, 0.2)])
def test_causes_of_a_stall_sum_to_it(blocked: float, longer: float) -> None:
    columns = {semconv.CAUSE_UNEXPLAINED: np.array([1000, 0])}
    none = np.zeros(2, np.int64)
    delays = _ThreadDelayColumns(none, none, np.full(2, blocked), np.full(2, longer))
    _move_stalls(columns, none[:0], none[:0], delays, None)
    assert [int(sum(column[row] for column in columns.values())) for row in (0, 1)] == [1000, 0]
    assert min(int(column.min()) for column in columns.values()) >= 0


def test_a_batch_larger_than_any_before_runs_longer_because_of_its_sequences() -> None:
    columns = {
        semconv.CAUSE_BATCHING: np.array([10, 10, 10]),
        semconv.CAUSE_RAN_LONGER: np.array([300, 500, 0]),
    }
    steps: Any = SimpleNamespace(size=np.array([8, 9, 40]), repeat_per_step=lambda lines: lines[:, 0])
    record: Any = SimpleNamespace(cost_model=StepCostModel(1e6, 0.0, 0.0, 10, max_size=8))
    _move_to_batching([record], steps, columns)
    assert {cause: column.tolist() for cause, column in columns.items()} == {
        semconv.CAUSE_BATCHING: [10, 510, 10],
        semconv.CAUSE_RAN_LONGER: [300, 0, 0],
    }
