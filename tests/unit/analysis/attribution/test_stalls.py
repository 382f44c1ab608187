"""A stall is divided among its causes, and never counts twice."""

from __future__ import annotations

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.analysis.attribution.decode import _move_stalls, _ThreadDelayColumns


@pytest.mark.parametrize(("blocked", "longer"), [(0.7, 0.6), (1.0, 1.0), (0.0, 1.0), (0.3, 0.2)])
def test_causes_of_a_stall_sum_to_it(blocked: float, longer: float) -> None:
    columns = {semconv.CAUSE_UNEXPLAINED: np.array([1000, 0])}
    none = np.zeros(2, np.int64)
    delays = _ThreadDelayColumns(none, none, np.full(2, blocked), np.full(2, longer))
    _move_stalls(columns, none[:0], none[:0], delays, None)
    assert [int(sum(column[row] for column in columns.values())) for row in (0, 1)] == [1000, 0]
    assert min(int(column.min()) for column in columns.values()) >= 0
