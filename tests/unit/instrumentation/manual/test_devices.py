"""Manual stages and steps on several GPUs: the device that times them."""

from __future__ import annotations

from typing import Any

import pytest

import otel_infer
from otel_infer.gpu.timing import UNTIMED, DeviceTiming
from otel_infer.instrumentation.manual._scope import resolve_device
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with CUDA in use, whose current device is the second."""
    monkeypatch.setattr(DeviceTiming, "is_device_timed", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("second_device")
def test_true_resolves_to_the_current_device() -> None:
    assert resolve_device(True) == torch.device("cuda", 1)
    assert resolve_device("cuda:3") == torch.device("cuda", 3)
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(RuntimeError):
        resolve_device("no-such-device")


def test_untimed_device_resolves_to_none() -> None:
    assert resolve_device(True) is None
    assert resolve_device("no-such-device") is None


@pytest.mark.usefixtures("second_device")
def test_stages_and_steps_use_the_given_device(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_devices: list[Any] = []

    def begin(*args: Any, on: Any = None, **kwargs: Any) -> int:
        timed_devices.append(on)
        return UNTIMED

    monkeypatch.setattr("otel_infer.gpu.timing.timing.begin", begin)
    with otel_infer.request() as request:
        for gpu in (True, "cuda:3"):
            with otel_infer.stage("rerank", gpu=gpu), otel_infer.step([request], gpu=gpu):
                pass
    assert [str(device) for device in timed_devices] == ["cuda:1", "cuda:1", "cuda:3", "cuda:3"]


@pytest.mark.usefixtures("second_device")
def test_invalid_device_loses_only_device_times(recording: Recording) -> None:
    with otel_infer.request() as request:
        with otel_infer.stage("rerank", gpu="no-such-device"):
            pass
        for number in range(3):
            prompt = {request: 5} if not number else None
            with otel_infer.step([request], prompt_tokens=prompt, gpu="no-such-device"):
                pass
    (record,) = recording.records()
    assert record.find_stage("rerank") is not None
    assert record.steps is not None
    assert len(record.steps) == 3
    assert record.find_stage("decode") is not None
