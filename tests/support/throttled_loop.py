"""A decode loop on the fake device whose last request runs at a quarter of the speed, as with throttled GPU clocks.

LD_LIBRARY_PATH=STUB otel-infer run --tape FILE -- python tests/support/throttled_loop.py
"""

from __future__ import annotations

import sys
import time
from types import ModuleType

import torch

import otel_infer
from otel_infer.gpu.timing import timing
from tests.support.fake_device import OnHostClock

STEP_NS, SLOW_NS = 5_000_000, 20_000_000


def decode(device: OnHostClock, tokens: int, slow_from: int) -> None:
    """Runs one request; steps from `slow_from` on take the device four times as long."""
    with otel_infer.request("chat", model="toy") as request:
        request.submitted(input_tokens=8, max_tokens=tokens)
        for number in range(tokens):
            with otel_infer.step(
                [request], prompt_tokens={request: 8} if number == 0 else {}, gpu=True
            ) as step:
                _, done_at = device.launch(SLOW_NS if number >= slow_from else STEP_NS)
                step.launched()
                time.sleep(max(done_at - device.now(), 0) / 1e9)
        request.finished("length", tokens)


def main() -> None:
    otel_infer.instrument()
    device = OnHostClock()
    device.kind = "cuda"
    cuda = ModuleType("torch.cuda")
    cuda.is_initialized, cuda.current_device = lambda: True, lambda: 0  # type: ignore[attr-defined]
    sys.modules["torch.cuda"] = torch.cuda = cuda  # type: ignore[assignment]
    timing._find_device = lambda: device  # replaces the lookup of CUDA's current device
    for _ in range(12):
        decode(device, 16, slow_from=16)
    decode(device, 40, slow_from=10)
    otel_infer.flush(10.0)


if __name__ == "__main__":
    main()
