"""The server's clock, and the start time of this process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from otel_infer import _clock


def test_process_start_is_read_from_the_system() -> None:
    script = "from otel_infer import _clock as clock; print(clock.read_process_start())"
    before = _clock.now()
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The system counts in ticks of 10 ms and reports the tick that had begun.
    assert before - 20_000_000 <= int(ran.stdout) <= _clock.now()


def test_process_start_is_zero_without_boot_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert _clock.read_process_start() == 0
