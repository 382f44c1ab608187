"""The doctor signals a process of its own, and reports what keeps stacks from being recorded."""

from __future__ import annotations

import os

import pytest

from otel_infer.cli.doctor import stacks
from otel_infer.config.environment import Config
from otel_infer.ringbuffer.native import native


def refuse(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.skipif(native is None or not hasattr(os, "pidfd_open"), reason="no compiled module, or no pidfd")
def test_a_real_signal_is_tried() -> None:
    assert stacks.check_stacks(Config()).state == "ok"


@pytest.mark.skipif(native is None, reason="the compiled module is missing")
def test_a_forbidden_system_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    check = stacks.check_stacks(Config())
    assert (check.state, "not permitted" in check.found, "pidfd_open" in check.do) == ("warn", True, True)


@pytest.mark.skipif(native is None, reason="the compiled module is missing")
def test_a_signal_that_does_not_arrive_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.native, "signal_thread", lambda *_: None)
    assert "did not arrive" in stacks.check_stacks(Config()).found


def test_a_missing_module_and_the_setting_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "OTEL_INFER_STACKS=off" in stacks.check_stacks(Config(stacks=False)).found
    monkeypatch.setattr(stacks, "native", None)
    assert stacks.check_stacks(Config()).state == "warn"
