"""The clock of the whole server, and how long this process has been there."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from otel_infer import _clock


def test_a_process_began_when_it_was_started() -> None:
    script = "from otel_infer import _clock as clock; print(clock.read_process_start())"
    before = _clock.now()
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The system counts in ticks of 10 ms, and a tick is the one that had begun.
    assert before - 20_000_000 <= int(ran.stdout) <= _clock.now()


def test_where_the_system_does_not_say_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert _clock.read_process_start() == 0
