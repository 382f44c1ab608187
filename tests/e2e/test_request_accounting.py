"""In each fault, every request that a client sent is exported, or lost by a named reason, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accounting.scenarios import QUICK, SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_is_accounted_for(name: str, tmp_path: Path) -> None:
    try:
        outcome = SCENARIOS[name](tmp_path, QUICK)
    except PermissionError as reason:
        pytest.skip(str(reason))
    outcome.check()
