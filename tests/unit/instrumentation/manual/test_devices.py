"""Stages and steps of one's own on one of several devices: which one is asked for its time."""

from __future__ import annotations

from typing import Any

import pytest

import otel_infer
from otel_infer.gpu.timing import UNTIMED, DeviceTiming
from otel_infer.instrumentation.manual._scope import resolve_device
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with CUDA in use, whose current device is the second one."""
    monkeypatch.setattr(DeviceTiming, "is_device_timed", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("second")
def test_true_is_the_thread_s_current_device_and_anything_else_names_one() -> None:
    assert resolve_device(True) == torch.device("cuda", 1)
    assert resolve_device("cuda:3") == torch.device("cuda", 3)
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(RuntimeError):
        resolve_device("the big one")


def test_without_a_device_nothing_is_asked() -> None:
    assert resolve_device(True) is None
    assert resolve_device("the big one") is None


@pytest.mark.usefixtures("second")
def test_a_stage_and_a_step_are_timed_on_the_device_that_they_are_on(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def begin(*args: Any, on: Any = None, **kwargs: Any) -> int:
        asked.append(on)
        return UNTIMED

    monkeypatch.setattr("otel_infer.gpu.timing.timing.begin", begin)
    with otel_infer.request() as request:
        for gpu in (True, "cuda:3"):
            with otel_infer.stage("rerank", gpu=gpu), otel_infer.step([request], gpu=gpu):
                pass
    assert [str(on) for on in asked] == ["cuda:1", "cuda:1", "cuda:3", "cuda:3"]


@pytest.mark.usefixtures("second")
def test_what_is_no_device_costs_the_device_s_time_alone(recording: Recording) -> None:
    with otel_infer.request() as request:
        with otel_infer.stage("rerank", gpu="the big one"):
            pass
        for number in range(3):
            prompt = {request: 5} if not number else None
            with otel_infer.step([request], prompt_tokens=prompt, gpu="the big one"):
                pass
    (record,) = recording.records()
    assert record.find_stage("rerank") is not None
    assert record.steps is not None
    assert len(record.steps) == 3
    assert record.find_stage("decode") is not None
